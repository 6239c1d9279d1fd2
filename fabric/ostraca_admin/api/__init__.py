"""REST interface of the admin service.

``app`` assembles the service, ``routes`` has the paths, ``forms`` the requests, ``views`` the answers,
``problems`` the errors, and ``access`` the tokens and roles.
"""
