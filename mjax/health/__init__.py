"""Host health: find faults before they fail a run, and the hosts to blame."""
