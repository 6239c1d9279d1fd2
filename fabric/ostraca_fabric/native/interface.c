/* Interface number of this library; `__init__.py` accepts only its own. */

#include "ostraca.h"

PUBLIC int64_t ostraca_interface(void) { return OSTRACA_INTERFACE; }
