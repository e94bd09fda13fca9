"""What a compiled step will do on a cluster, read before there is one."""
