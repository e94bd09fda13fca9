"""Closed-form models of a training step: no array, no device, no compiler."""
