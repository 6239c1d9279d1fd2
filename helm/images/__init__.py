"""Container images of Ostraca: recipes, and builds with and without a container engine."""
