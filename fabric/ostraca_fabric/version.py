"""Which release this is: a constant, since to look an installed package's metadata up takes 50 ms."""

VERSION = "0.1.0"
