"""What a run is around its steps: loop, rows, reports, its folder."""
