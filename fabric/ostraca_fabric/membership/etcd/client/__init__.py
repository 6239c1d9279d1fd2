"""Call etcd over gRPC: channels, retries, watches, transactions."""
