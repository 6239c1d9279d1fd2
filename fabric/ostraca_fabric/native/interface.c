/* Which interface this library has: `__init__.py` uses no other than its own. */

#include "ostraca.h"

PUBLIC int64_t ostraca_interface(void) { return OSTRACA_INTERFACE; }
