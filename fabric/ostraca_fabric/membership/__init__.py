"""Membership and map of the fabric, in etcd or in memory."""
