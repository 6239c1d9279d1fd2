"""Keys and records in etcd, and the fabric map built from them. Pure."""
