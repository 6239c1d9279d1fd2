"""Version of this release.

The version is a constant, since reading an installed package's metadata takes 50 ms.
"""

VERSION = "0.1.0"
