"""Convert a generated series to the observations of mjax's detectors."""

from mjax.health.watch.samples import Observation, Port, Sample, Step, Window, seen_s
from tests.health.series import Series


def port_of(series: Series) -> Port:
    """Return the port of a series."""
    port = series.port
    return Port(
        link_layer=port.link_layer,
        rate_gbit_per_s=port.rate_gbit_per_s,
        data_bytes_per_s=port.data_bytes_per_s,
        data_counter_bits=port.data_counter_bits,
    )


def observe(series: Series) -> list[Observation]:
    """Return all observations of sampler and trainer, in time order."""
    readings = series.readings
    names = list(readings.counters)
    columns = [readings.counters[name].tolist() for name in names]
    rows = zip(
        readings.time_s.tolist(),
        readings.state.tolist(),
        zip(*columns, strict=True),
        strict=True,
    )
    samples = [
        Sample(
            time_s=time_s, state=state, counters=dict(zip(names, values, strict=True))
        )
        for time_s, state, values in rows
    ]
    windows = [
        Window(time_s=each.time_s, port_xmit_data=each.port_xmit_data)
        for each in readings.windows
    ]
    steps = [
        Step(end_s=end_s, step_s=step_s)
        for end_s, step_s in zip(
            series.step_end_s.tolist(), series.step_s.tolist(), strict=True
        )
    ]
    return sorted([*samples, *windows, *steps], key=seen_s)
