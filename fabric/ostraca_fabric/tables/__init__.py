"""Tables in arrays: digests, keys and slots, with loops in native code."""
