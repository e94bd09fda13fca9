"""`python -m mjax.doctor`: check whether a run can start here, before it costs money.

It checks software, names, ports, folders and a group of two processes on this host. The
checks of `mjax.health` test the hardware; the runner of `mjax.health` runs all checks.
With `--together` the processes of a launcher also connect, compare software, read each
other's files and add a number over all devices.

`probe` collects facts about the host, each kind in its own process with a time limit.
`software`, `network` and `folders` judge these facts.
"""
