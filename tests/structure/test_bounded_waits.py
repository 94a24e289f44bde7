"""Every wait for a thread, a process or a lock has a time limit."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAITS = {"wait": 1, "join": 1, "result": 1, "wait_for": 2, "acquire": 2, "communicate": 2}
"""Methods that wait, and with how many arguments they have a time limit."""
BOUNDED = {
    "self.wait()": "the checkpoint saver's own, which has a limit",
    "run.saver.wait()": "as above",
    "event.wait()": "within asyncio.timeout",
    "asked.news.wait()": "requests are in flight, which their time limits end",
    "ended.wait()": "the process of a tool, until the trainer closes its pipe",
    "task.result()": "of a task of asyncio that has ended",
    "work.wait()": "of a collective that is completed",
    "self._changed.wait_for(ready)": "within asyncio.wait_for, which has one",
    "reply.result()": "a request to a server, which has a time limit",
    "self._group.broadcast([tensor], options).wait()": "the limit is in the options",
    "thread.submit(function).result()": "rewards, workflows and resets of environments, which have limits",
    "wait_for(self.start(calls[0], extras))": "our own function: a reward function, as above",
    "wait_for(function.start(arguments, extras))": "as above",
    "lock_file(lock, wait=True)": "a folder made just now; another start holds it while it looks",
}


def without_limit(source: str) -> list[str]:
    """Return the calls of a module that may wait for ever."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _waits_for_ever(node)
    ]


def _waits_for_ever(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        locks = any(keyword.arg == "wait" and ast.unparse(keyword.value) == "True" for keyword in call.keywords)
        return locks or call.func.id == "wait_for"
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    if name == "flock":
        return "LOCK_NB" not in ast.unparse(call) and "LOCK_UN" not in ast.unparse(call)
    limited = len(call.args) >= WAITS.get(name, 0) or any(
        keyword.arg in ("timeout", "blocking") for keyword in call.keywords
    )
    return name in WAITS and not limited


def test_the_search_finds_waits_without_limit():
    source = "a.wait()\nb.join()\nc.result(3)\nd.wait_for(f)\ne.wait_for(f, 3)\n','.join(x)\ng.wait(timeout=2)"
    source += "\nflock(1)\nh(1, wait=True)"
    assert without_limit(source) == ["a.wait()", "b.join()", "d.wait_for(f)", "h(1, wait=True)"]


def test_every_wait_of_the_packages_and_scripts_has_a_limit():
    files = [path for folder in ("hwgrpo", "backends", "kernels", "scripts") for path in (ROOT / folder).rglob("*.py")]
    found = {(str(path.relative_to(ROOT)), call) for path in files for call in without_limit(path.read_text("utf-8"))}
    assert {(path, call) for path, call in found if call not in BOUNDED} == set()
    assert {call for _, call in found} == set(BOUNDED), "an exception that is not needed any more"
