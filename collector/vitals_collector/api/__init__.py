"""What listens: the socket, who may ask, the routes, and ``/metrics``."""
