"""Routes of the admin REST API, with a module per resource."""
