"""Can a run be started here? `python -m mjax.doctor` says, before any money is spent.

Software, names and ports, folders and a group of two processes are tried on this host.
Its hardware is judged by the checks of `mjax.health`, whose runner does all of it. With
`--together` the processes of a launcher also meet, compare software, read each other's
files and add a number over all devices.

`probe` finds facts, each kind in a process of its own with a time limit; `software`,
`network` and `folders` judge them.
"""
