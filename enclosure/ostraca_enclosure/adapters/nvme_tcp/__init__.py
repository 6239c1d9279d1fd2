"""NVMe/TCP target in this process, without nvmet and without privileges.

``subsystem`` holds drives, hosts and controllers; ``session`` serves a connection; ``server`` listens;
``tcp_exporter`` applies the steps of the enclosure's plan. Exports end with the process.
"""
