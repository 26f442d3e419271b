"""The server: socket, authentication, routes, and ``/metrics``."""
