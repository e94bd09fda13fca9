"""What every program needs: flags, exit codes, Ctrl-C, servers on sockets."""
