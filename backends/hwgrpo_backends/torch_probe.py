"""Runs as a script in a child process: imports torch, looks at its devices, prints a line of JSON.

It prints one before it looks at devices, too, for the case that this does not end. It stands alone (it may not import
its own package, nor anything that is not in the standard library or torch) and it catches every exception and reports
it to the parent.
"""

import importlib
import importlib.util
import json
import sys
import warnings

MARKER = "hwgrpo.torch_probe/1 "


def chain(error: BaseException | None) -> list[str]:
    """Return "Type: message" of an exception and its causes, the root cause last."""
    lines: list[str] = []
    while error is not None and len(lines) < 10:
        lines.append(f"{type(error).__name__}: {error}".strip()[:500])
        error = error.__cause__ or error.__context__
    return lines


def look_at(torch, device_type: str) -> dict:
    """Return torch's facts about `device_type`; opens no device, though it may load the driver."""
    found: dict = {"available": False, "count": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module = torch.get_device_module(device_type)
            found["available"] = bool(module.is_available())
            if found["available"]:
                found["count"] = int(module.device_count())
                indices = range(found["count"])
                found["names"] = [str(module.get_device_name(index)) for index in indices]
                if device_type == "cuda":
                    found["built_for"] = list(module.get_arch_list())
                    found["archs"] = [arch(torch, module.get_device_properties(index)) for index in indices]
        except Exception as error:
            found["available"] = False
            found["problem"] = chain(error)[-1]
    if not found["available"] and "problem" not in found and caught:
        found["problem"] = str(caught[-1].message).split("\n")[0][:500]
    return found


def arch(torch, properties) -> str:
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def main(targets: list) -> dict:
    """Return the facts of tier 1 for `targets`, a list of [device type, plug-in module or null]."""
    facts: dict = {"imported": False, "errors": [], "plugins": {}, "devices": {}}
    try:
        import torch
    except (Exception, SystemExit) as error:
        return facts | {"errors": chain(error)}
    facts["imported"] = True
    version = getattr(torch, "version", None)
    facts |= {"version": str(getattr(torch, "__version__", "unknown"))}
    facts |= {name: getattr(version, name, None) for name in ("cuda", "hip")}
    for _, plugin in targets:
        if plugin and importlib.util.find_spec(plugin):
            try:
                importlib.import_module(plugin)
                facts["plugins"][plugin] = []
            except (Exception, SystemExit) as error:
                facts["plugins"][plugin] = chain(error)
    print_line(facts)  # a driver may hang from here on
    for device_type, _ in targets:
        facts["devices"][device_type] = look_at(torch, device_type)
    return facts


def print_line(facts: dict) -> None:
    print("\n" + MARKER + json.dumps(facts), flush=True)


if __name__ == "__main__":
    print_line(main(json.loads(sys.argv[1])))
