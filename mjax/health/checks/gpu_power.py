"""Checks of the clocks, throttle reasons, power and temperature of GPUs.

Input: the output of `nvidia-smi -q -x` of an idle host. Output: verdicts.

Temperatures come in two forms. Drivers for Ada and later give the distance to the
temperature at which the GPU slows down (T.Limit); earlier ones give temperatures. Both
are converted to a margin: degrees below the maximum of normal operation. No field shows
a clock locked by `nvidia-smi -lgc`, and an idle SM clock is always low; `python -m
mjax.health burn` finds such a lock.
Sources: https://docs.nvidia.com/deploy/nvidia-smi/index.html; for throttle reasons
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksThrottleReasons.html
"""

from mjax.health.checks.nvidia_smi import (
    Gpu,
    Seen,
    judge_gpus,
    limit_of,
    smi_check,
)
from mjax.health.findings import UnreadableError, Verdict
from mjax.health.settings import Settings

_ACTIVE = ("Not Active", "Active")
_GONE = "Requested functionality has been deprecated"


_COOL = "Check fans, air flow, inlet temperature and the heat sink of this GPU."


@smi_check(
    "gpu.clocks",
    action="Run `nvidia-smi -rgc` and `nvidia-smi -rmc`; compare the VBIOS.",
)
def clocks(text: str, settings: Settings) -> Verdict:
    """No GPU's maximum clocks are lowered.

    The memory clock is judged only in P0, where data-centre GPUs stay; in other states
    it is lowered to save power.
    """
    most = limit_of(settings, "gpu.clocks", "max_below_mhz")

    def look(gpu: Gpu) -> Seen:
        has = gpu.number("MHz", "max_clocks/sm_clock")
        boost = gpu.number("MHz", "max_customer_boost_clocks/graphics_clock")
        if has < boost:
            bad = f"its maximum SM clock is {has:g} of {boost:g} MHz"
            return Seen(value=f"{has:g} MHz", bad=bad, rank=-has)
        state = gpu.text("performance_state")
        if state != "P0":
            raise UnreadableError(f"{gpu.label}: it is in {state}, not P0")
        memory = gpu.number("MHz", "clocks/mem_clock")
        fastest = gpu.number("MHz", "max_clocks/mem_clock")
        if fastest - memory > most:
            bad = f"its memory clock is {memory:g} of {fastest:g} MHz"
            return Seen(value=f"{has:g} MHz", bad=bad, rank=-has)
        return Seen(value=f"{has:g} MHz", rank=-has)

    return judge_gpus(text, look, limit="the maximum")


@smi_check("gpu.applications_clocks", action="Run `nvidia-smi -rac`.")
def applications_clocks(text: str, settings: Settings) -> Verdict:
    """Application clocks are at their default.

    Drivers of CUDA 13 report that they have no application clocks, so the check passes.
    """
    del settings

    def look(gpu: Gpu) -> Seen:
        shown = []
        for clock in ("graphics_clock", "mem_clock"):
            path = f"applications_clocks/{clock}"
            if gpu.fields.get(path) == gpu.fields.get(f"default_{path}") == _GONE:
                continue
            has = gpu.number("MHz", path)
            default = gpu.number("MHz", f"default_{path}")
            if has != default:
                bad = f"{path} is {has:g} MHz, by default {default:g} MHz"
                return Seen(value=f"{has:g} MHz", bad=bad)
            shown.append(f"{has:g} MHz")
        return Seen(value=", ".join(shown) or "deprecated")

    return judge_gpus(text, look, limit="the default")


def _throttle(text: str, reason: str) -> Verdict:
    def look(gpu: Gpu) -> Seen:
        word = gpu.word(
            _ACTIVE,
            f"clocks_event_reasons/clocks_event_reason_{reason}",
            f"clocks_throttle_reasons/clocks_throttle_reason_{reason}",
        )
        if word != "Not Active":
            return Seen(value=word, bad=f"{reason} is active")
        return Seen(value=word)

    return judge_gpus(text, look, limit="Not Active")


@smi_check(
    "gpu.throttle_hw_slowdown",
    action=f"Find out whether heat or the power brake is the cause. {_COOL}",
)
def throttle_hw_slowdown(text: str, settings: Settings) -> Verdict:
    """No GPU is slowed down by its hardware."""
    del settings
    return _throttle(text, "hw_slowdown")


@smi_check("gpu.throttle_hw_thermal", action=_COOL)
def throttle_hw_thermal(text: str, settings: Settings) -> Verdict:
    """No GPU is slowed down by its hardware because of heat."""
    del settings
    return _throttle(text, "hw_thermal_slowdown")


@smi_check(
    "gpu.throttle_hw_power_brake",
    action="Check the power supplies and the power cap in the BMC.",
)
def throttle_hw_power_brake(text: str, settings: Settings) -> Verdict:
    """No GPU is slowed down by the power supply of the host."""
    del settings
    return _throttle(text, "hw_power_brake_slowdown")


@smi_check("gpu.throttle_sw_thermal", action=_COOL)
def throttle_sw_thermal(text: str, settings: Settings) -> Verdict:
    """No GPU is slowed down by the driver because of heat."""
    del settings
    return _throttle(text, "sw_thermal_slowdown")


def _watts(gpu: Gpu, *names: str) -> float:
    """Return a power reading from the field that this driver uses."""
    groups = ("gpu_power_readings", "power_readings")
    return gpu.number("W", *(f"{group}/{name}" for group in groups for name in names))


@smi_check(
    "gpu.power_limit", action="Run `nvidia-smi -pl DEFAULT`; find out what changed it."
)
def power_limit(text: str, settings: Settings) -> Verdict:
    """The power limit of each GPU is at its default."""
    most = limit_of(settings, "gpu.power_limit", "max_difference_w")

    def look(gpu: Gpu) -> Seen:
        has = _watts(gpu, "current_power_limit", "power_limit")
        default = _watts(gpu, "default_power_limit")
        if abs(has - default) > most:
            bad = f"its power limit is {has:g} W, by default {default:g} W"
            return Seen(value=f"{has:g} W", bad=bad, rank=-has)
        return Seen(value=f"{has:g} W", rank=-has)

    return judge_gpus(text, look, limit="the default")


@smi_check(
    "gpu.power_draw",
    needs_idle=True,
    action="Stop the processes on it. If there are none, reset the GPU.",
)
def power_draw(text: str, settings: Settings) -> Verdict:
    """An idle GPU draws some power, but not much."""
    least = limit_of(settings, "gpu.power_draw", "min_w")
    most = limit_of(settings, "gpu.power_draw", "max_fraction")

    def look(gpu: Gpu) -> Seen:
        draws = _watts(gpu, "power_draw", "instant_power_draw")
        allowed = most * _watts(gpu, "default_power_limit")
        value = f"{draws:g} W"
        if draws < least:
            return Seen(value=value, bad=f"it draws {value}: a broken sensor")
        if draws > allowed:
            bad = f"it draws {value}, more than {allowed:g} W: it is not idle"
            return Seen(value=value, bad=bad, rank=draws)
        return Seen(value=value, rank=draws)

    return judge_gpus(text, look, limit=f"{least:g} W to {most:g} of the limit")


def _margin(gpu: Gpu) -> float:
    """Return the margin in degrees below the maximum of normal operation."""
    if gpu.has("temperature/gpu_temp_tlimit"):
        return gpu.number("C", "temperature/gpu_temp_tlimit")
    maximum = gpu.number(
        "C",
        "temperature/gpu_temp_max_gpu_threshold",
        "temperature/gpu_temp_slow_threshold",
    )
    return maximum - gpu.number("C", "temperature/gpu_temp")


@smi_check("gpu.temperature", needs_idle=True, action=_COOL)
def temperature(text: str, settings: Settings) -> Verdict:
    """An idle GPU is far below the temperature at which it slows down."""
    coldest = limit_of(settings, "gpu.temperature", "min_c")
    least = limit_of(settings, "gpu.temperature", "min_margin_c")

    def look(gpu: Gpu) -> Seen:
        has, margin = gpu.number("C", "temperature/gpu_temp"), _margin(gpu)
        value = f"{has:g} C"
        if has < coldest:
            return Seen(value=value, bad=f"it has {value}: a broken sensor")
        if margin < least:
            bad = f"it has {value}, {margin:g} below its maximum"
            return Seen(value=value, bad=bad, rank=-margin)
        return Seen(value=value, rank=-margin)

    return judge_gpus(text, look, limit=f"{least:g} C below the maximum")


@smi_check("gpu.memory_temperature", needs_idle=True, action=_COOL)
def memory_temperature(text: str, settings: Settings) -> Verdict:
    """The memory of an idle GPU is not hot."""
    coldest = limit_of(settings, "gpu.memory_temperature", "min_c")
    most = limit_of(settings, "gpu.memory_temperature", "max_c")

    def look(gpu: Gpu) -> Seen:
        has = gpu.number("C", "temperature/memory_temp")
        value = f"{has:g} C"
        if has < coldest:
            return Seen(value=value, bad=f"its memory has {value}: a broken sensor")
        if has > most:
            return Seen(value=value, bad=f"its memory has {value}", rank=has)
        return Seen(value=value, rank=has)

    return judge_gpus(text, look, limit=f"at most {most:g} C")


CHECKS = (
    clocks,
    applications_clocks,
    throttle_hw_slowdown,
    throttle_hw_thermal,
    throttle_hw_power_brake,
    throttle_sw_thermal,
    power_limit,
    power_draw,
    temperature,
    memory_temperature,
)
