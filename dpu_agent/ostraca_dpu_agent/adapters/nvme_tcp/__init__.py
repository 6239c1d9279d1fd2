"""NVMe/TCP initiator in this process, without the kernel's and without privileges.

``queue_pair`` is a connection, ``association`` a controller with its connections, ``tcp_drive`` a drive, and
``tcp_paths`` the paths to enclosures.
"""
