"""Scripts for work on this repository. No script is part of the product."""
