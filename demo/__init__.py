"""The demo: a real transformer that skips its prefill, because its KV cache came out of Ostraca.

`paging` lays the cache out and cuts it into blocks; `model` builds the transformer and computes with it.
Neither knows Ostraca: what they hand over is lists of torch views, which is all that the SDK asks for.
"""
