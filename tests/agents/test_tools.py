"""Tools under stress: each call ends with a result, in time, and no process is left."""

import asyncio
import base64
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from PIL import Image

from hwgrpo.agents import tools as tools_module
from hwgrpo.agents.action import ToolResult
from hwgrpo.agents.tool_results import pack_result, shorten, unpack_result
from hwgrpo.agents.tools import close_tools, load_tools
from hwgrpo.config.schema import ToolConfig
from hwgrpo.errors import ConfigError
from hwgrpo.support.child_processes import descendants

PATIENT = 60.0
"""Limit in seconds of calls that end by themselves."""
SHORT = 1.0
"""Limit of calls that hang; those beside them end at once."""

FILE = '''
import asyncio, ctypes, os, signal, subprocess, sys, time
from hwgrpo.agents.action import ToolResult

def act(what: str, n: int = 0, *, greeting: str = "no"):
    """Do something.

    Args:
        what: What to do.
        n: A number.
        greeting: A greeting.
    """
    match what:
        case "hang in C":
            ctypes.PyDLL(None).sleep(600)  # with the GIL
        case "hang with children":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            open(f"children-{n}", "w").write(str(child.pid))
            time.sleep(600)
        case "raise": raise ValueError("no city\\n'x'")
        case "exit": raise SystemExit(3)
        case "flood": return "a" * n + "b" * n
        case "die": os._exit(3)
        case "crash": ctypes.string_at(0)
        case "bytes": return b"a"
        case "set": return {1}
        case "cyclic":
            cyclic = []
            cyclic.append(cyclic)
            return cyclic
        case "picture":
            from PIL import Image
            said = {"type": "text", "text": f"torch: {'torch' in sys.modules}"}
            return [said, Image.new("RGB", (n, 2), "red"), Image.new("RGB", (2, n), "blue")]
        case "video": return [{"type": "video", "video": "a.mp4"}]
        case "none": return None
        case "dict": return {"n": n, "text": "ü", "list": [1.5, None, True]}
        case "surrogate": return "a\\ud800b"
        case "reward": return ToolResult("well done", reward=0.5)
        case "infinite reward": return ToolResult("well done", reward=float("inf"))
        case "print": print("printed by the tool", flush=True)
        case "pid": return os.getpid()
        case "sleep": time.sleep(n / 1000)
    return f"{greeting} {what} {n}"

running = []

async def wait(what: str, n: int = 0):
    """Wait.

    Args:
        what: What to do.
        n: Milliseconds.
    """
    match what:
        case "block": time.sleep(600)
        case "deaf":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        case "hang":
            process = await asyncio.create_subprocess_exec("sleep", "600")
            open(f"sleep-{n}", "w").write(str(process.pid))
            await asyncio.sleep(600)
        case "raise": raise KeyError(n)
        case "exit": raise SystemExit(3)
        case "cancel": raise asyncio.CancelledError
        case "timeout": raise TimeoutError("of its own")
        case "die":
            os._exit(4)
        case "die among others":  # the first time: with another call in its process
            again = os.path.exists(f"deaths-{n}")
            while not again and len(asyncio.all_tasks()) < 3:  # that of the process, this one, another
                await asyncio.sleep(0.01)
            open(f"deaths-{n}", "a").write("x")
            os._exit(4)
        case "pid": return os.getpid()
        case "together":  # the calls that run at once; the last of n lets all end
            running.append(what)
            while len(running) < n:
                await asyncio.sleep(0.01)
            return len(running)
    await asyncio.sleep(n / 1000)
    return n
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    (folder / "own.py").write_text(FILE)
    return folder


def opened(folder, *configs):
    return load_tools(configs, folder=str(folder))


def config(folder, function, timeout, workers=2, **options):
    return ToolConfig(name=f"{folder}/own.py:{function}", timeout=timeout, workers=workers, **options)


@pytest.fixture(scope="module")
def patient(folder):
    """Two tools with time, of a module's tests: `act` and `wait`."""
    tools = opened(
        folder,
        config(folder, "act", PATIENT, kwargs={"greeting": "hello"}, max_chars=100),
        config(folder, "wait", PATIENT),
    )
    yield tools
    close_tools(tools)


@pytest.fixture(scope="module")
def hasty(folder):
    """The same with a short limit."""
    tools = opened(folder, config(folder, "act", SHORT, workers=3), config(folder, "wait", SHORT, workers=2))
    yield tools
    close_tools(tools)


def call(tool, *calls):
    """Make calls at once, in an event loop of their own; return the results."""

    async def all_of_them():
        return await asyncio.gather(*(tool.call(each) for each in calls))

    return asyncio.run(all_of_them())


def alive(number):
    """Return whether a process has not ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "text", "failure"),
    [
        ({"what": "hi", "n": 2}, "hello hi 2", ""),
        ({"what": "none"}, "null", ""),
        ({"what": "dict", "n": 1}, '{"n": 1, "text": "ü", "list": [1.5, null, true]}', ""),
        ({"what": "surrogate"}, "a?b", ""),
        ({"what": "print"}, "hello print 0", ""),
        ({"what": "raise"}, "Error: ValueError: no city 'x'", "error"),
        ({"what": "exit"}, "Error: SystemExit: 3", "error"),
        ({"what": "bytes"}, "Error: the tool returned a value of type bytes", "error"),
        ({"what": "set"}, "Error: the tool returned a value of type set", "error"),
        ({"what": "video"}, "Error: the tool's result, block 0 is of type 'video'", "error"),
        ({"what": "cyclic"}, "Error: the tool returned a value of type list", "error"),
        ({"what": "infinite reward"}, "Error: the tool gave the reward inf", "error"),
        ({"what": "die"}, "Error: act lost its process, which ended with exit code 3", "died"),
        ({"what": "crash"}, "Error: act lost its process, which was killed by SIGSEGV, a segmentation fault", "died"),
        ({"what": 3}, "Error: what must be of type string, not integer: 3.", "malformed"),
        ({}, "Error: act needs the parameter 'what'; it has: what, n.", "malformed"),
        ({"what": "hi", "greeting": "me"}, "Error: act has no parameter 'greeting'; it has: what, n.", "malformed"),
    ],
)
def test_a_call_gives_its_value_or_a_failure_that_the_model_can_read(patient, arguments, text, failure):
    (result,) = call(patient[0], arguments)
    assert (result.text.startswith(text), result.failure) == (True, failure), result
    if not failure:
        assert result.text == text


def test_images_of_a_process_arrive_in_order_as_they_were(patient):
    """Of 300 x 2 and 2 x 300 pixels, with a text that says whether the process has imported torch."""
    (result,) = call(patient[0], {"what": "picture", "n": 300})
    assert result.text == "torch: False"
    images = [Image.open(io.BytesIO(base64.b64decode(block["base64"]))) for block in result.blocks]
    assert [(image.size, image.getcolors()) for image in images] == [
        ((300, 2), [(600, (255, 0, 0))]),
        ((2, 300), [(600, (0, 0, 255))]),
    ]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("raise", "Error: KeyError: 5"),
        ("exit", "Error: SystemExit: 3"),
        ("cancel", "Error: the call was cancelled"),
        ("timeout", "Error: TimeoutError: of its own"),
    ],
)
def test_an_async_function_that_raises_harms_no_other_call(patient, what, text):
    failed, other = call(patient[1], {"what": what, "n": 5}, {"what": "", "n": 5})
    assert (failed.text, failed.failure) == (text, "error")
    assert other == ToolResult("5", seconds=other.seconds)


def test_a_long_result_is_cut_in_its_process(patient):
    (result,) = call(patient[0], {"what": "flood", "n": 40_000_000})  # 80 MB: more than a message may have
    assert result.text == "a" * 50 + "...[79999900 characters left out]..." + "b" * 50


def test_a_tool_may_give_a_reward(patient):
    (result,) = call(patient[0], {"what": "reward"})
    assert (result.text, result.reward, result.failure) == ("well done", 0.5, "")


def test_a_process_is_kept_between_calls_and_event_loops(patient):
    assert len({call(patient[0], {"what": "pid"})[0].text for _ in range(5)}) == 1


def test_processes_start_as_calls_need_them(patient):
    assert len({each.text for each in call(patient[0], *[{"what": "pid"}] * 4)}) <= 2
    call(patient[0], *[{"what": "sleep", "n": 300}] * 8)
    pids = call(patient[1], *[{"what": "pid"}] * 8)
    assert len({each.text for each in pids}) == 1  # eight calls of an async function share one
    assert {each.text for each in call(patient[1], *[{"what": "together", "n": 8}] * 8)} == {"8"}


def test_a_caller_that_gives_up_harms_nothing(patient):
    async def give_up():
        waiting = [asyncio.ensure_future(patient[0].call({"what": "sleep", "n": 200})) for _ in range(6)]
        await asyncio.sleep(0.05)
        for each in waiting:
            each.cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(each, asyncio.CancelledError) for each in asyncio.run(give_up()))
    assert call(patient[0], {"what": "hi"})[0].text == "hello hi 0"


def test_hanging_calls_are_killed_with_all_that_they_started(hasty, folder):
    act, _ = hasty
    calls = [{"what": "hang in C"}, {"what": "hang with children", "n": 7}, {"what": "hi"}, {"what": "raise"}]
    in_c, with_children, well, raised = call(act, *calls)
    for late in (in_c, with_children):
        assert (late.text, late.failure) == (f"Error: act took longer than {SHORT:g} s and was stopped", "timeout")
    assert (well.text, raised.failure) == ("no hi 0", "error")
    assert not alive(int((folder / "children-7").read_text()))


def test_thirty_calls_of_which_some_hang_and_some_die_all_end(hasty):
    kinds = [("hang in C", "timeout"), ("die", "died"), ("raise", "error"), *[("hi", "")] * 7]
    calls = [{"what": kinds[number % 10][0], "n": number} for number in range(30)]
    results = call(hasty[0], *calls)
    assert [each.failure for each in results] == [kinds[number % 10][1] for number in range(30)]
    assert all(each.text == f"no hi {number}" for number, each in enumerate(results) if not each.failure)


def test_an_async_call_that_hangs_is_cancelled_and_its_process_lives(hasty, folder):
    _, wait = hasty
    before = call(wait, {"what": "pid"})[0].text
    late, well = call(wait, {"what": "", "n": 600_000}, {"what": "", "n": 10})
    assert (late.failure, well.text) == ("timeout", "10")
    assert call(wait, {"what": "pid"})[0].text == before
    (late,) = call(wait, {"what": "hang", "n": 9})  # its subprocess is left: the process is replaced
    assert late.failure == "timeout"
    assert call(wait, {"what": "pid"})[0].text != before
    assert not alive(int((folder / "sleep-9").read_text()))


@pytest.mark.parametrize(("what", "failure"), [("block", "timeout"), ("deaf", "timeout"), ("die", "died")])
def test_an_async_call_that_takes_its_process_along_fails_alone(hasty, what, failure):
    """The others of the process are made once more."""
    well = [{"what": "", "n": number} for number in range(5)]
    culprit, *others = call(hasty[1], {"what": what}, *well)
    assert culprit.failure == failure
    assert [(each.text, each.failure) for each in others] == [(str(number), "") for number in range(5)]


def test_a_call_that_lost_its_process_is_made_once_more_and_alone(patient, folder):
    died, *others = call(patient[1], {"what": "die among others", "n": 77}, *[{"what": "", "n": 200}] * 11)
    assert (died.failure, {each.text for each in others}) == ("died", {"200"})
    assert (folder / "deaths-77").read_text() == "xx"


def serving(folder):
    """Return the processes of the tools of a file in a folder."""
    lines = {each: Path(f"/proc/{each}/cmdline") for each in descendants(os.getpid())}
    return [each for each, line in lines.items() if f"hwgrpo tool {folder}/".encode() in line.read_bytes()]


def test_no_process_is_left_when_tools_are_closed(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    tools = opened(tmp_path, config(tmp_path, "act", PATIENT, workers=2))
    assert [each.failure for each in call(tools[0], *[{"what": "sleep", "n": 300}] * 4)] == [""] * 4
    mine = serving(tmp_path)
    assert len(mine) == 4  # two, each with a supervisor

    async def close_while_it_runs():
        waiting = [asyncio.ensure_future(tools[0].call({"what": "sleep", "n": 600_000})) for _ in range(5)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(close_tools, tools)
        return [await each for each in waiting]

    assert {(each.text, each.failure) for each in asyncio.run(close_while_it_runs())} == {
        ("Error: act was closed", "died")
    }
    close_tools(tools)  # closing twice does nothing
    assert not any(map(alive, mine))
    assert not serving(tmp_path)


@pytest.mark.slow
def test_processes_end_with_a_trainer_that_is_killed_or_forgets_to_close(folder, soon):
    script = textwrap.dedent(f"""
        import asyncio, os, signal, sys
        from hwgrpo.agents.tools import load_tools
        from hwgrpo.config.schema import ToolConfig
        (tool,) = load_tools([ToolConfig(name="{folder}/own.py:act", workers=1)], folder=".")
        print(asyncio.run(tool.call({{"what": "pid"}})).text, flush=True)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    for end in ("killed", "forgets"):
        run = subprocess.run([sys.executable, "-c", script, end], capture_output=True, text=True, timeout=300)
        assert run.returncode == (-9 if end == "killed" else 0), run.stderr
        soon(lambda pid=int(run.stdout): not alive(pid))


def test_a_process_that_cannot_start_again_fails_its_calls(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    (tool,) = opened(tmp_path, config(tmp_path, "act", PATIENT, workers=1))
    try:
        (tmp_path / "own.py").write_text("raise OSError('the disk is gone')")
        died, late = call(tool, {"what": "die"}, {"what": "hi"})
        assert (died.failure, late.failure) == ("died", "died")
        assert "act is not available" in late.text
        assert "the disk is gone" in late.text
        (tmp_path / "own.py").write_text(FILE)
        assert call(tool, {"what": "hi"})[0].text == "no hi 0"
    finally:
        tool.close()


BROKEN = {
    "own.py:missing": "has no function 'missing'",
    "gone.py:f": "no file",
    "broken.py:f": "running the file failed: ZeroDivisionError",
    "ends.py:f": "its process ended with exit code 7 while it ran the file",
    "plain.py:f": r"f has no JSON schema: .*no docstring",
    "plain.py:C": "is a class; a tool is a function",
    "pyton": "choose one of: .*python, search.*Did you mean 'python'.*path/to/file.py:function",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_tool_that_cannot_be_loaded_is_named_with_its_setting(tmp_path, name):
    (tmp_path / "own.py").write_text("def f(): ...")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "ends.py").write_text("import os; os._exit(7)")
    (tmp_path / "plain.py").write_text("def f(a: int): ...\nclass C: ...")
    setting = f"{tmp_path}/{name}" if ".py" in name else name
    with pytest.raises(ConfigError, match=rf"rollout\.agent\.tools\.0\.name.*{BROKEN[name]}"):
        opened(tmp_path, ToolConfig(name=setting))


class Registered:
    """A registered tool for these tests."""

    closed = 0

    def __init__(self, size: int, *, workers: int, key: str, sandbox_level: str = "") -> None:
        self.size, self.given = size, (workers, key, sandbox_level)

    def run(self, text: str):
        """Repeat a text.

        Args:
            text: The text.
        """
        if text == "raise":
            raise ValueError("no")
        return ("stopped", "timeout") if text == "stop" else f"{text * self.size} {self.given}"

    def close(self) -> None:
        Registered.closed += 1


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(tools_module.TOOLS._own, "again", Registered)
    Registered.closed = 0


def test_a_registered_tool_gets_its_arguments_and_is_called_in_threads(registered, tmp_path):
    (tool,) = load_tools(
        [ToolConfig(name="again", kwargs={"size": 2}, workers=3)], folder=str(tmp_path), sandbox_level="seccomp"
    )
    assert tool.schema["function"]["name"] == "again"
    well, raised, stopped, malformed = call(tool, *[{"text": text} for text in ("a", "raise", "stop")], {})
    assert well.text == "aa (3, 'rollout.agent.tools.0', 'seccomp')"
    assert (raised.text, raised.failure) == ("Error: ValueError: no", "error")
    assert (stopped.text, stopped.failure) == ("stopped", "timeout")
    assert malformed.failure == "malformed"
    tool.close()
    assert Registered.closed == 1


def test_two_tools_of_one_name_are_refused_and_closed(registered, tmp_path):
    both = [ToolConfig(name="again", kwargs={"size": size}) for size in (1, 2)]
    with pytest.raises(
        ConfigError, match=r"tools\.0\.name='again' and .*tools\.1\.name='again' are both called 'again'"
    ):
        opened(tmp_path, *both)
    assert Registered.closed == 2
    with pytest.raises(ConfigError, match=r"tools\.0\.kwargs: argument of again.*siez.*Did you mean 'size'"):
        opened(tmp_path, ToolConfig(name="again", kwargs={"siez": 1}))


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "...[6 characters left out]...6789"),
        ("middle", "01...[6 characters left out]...89"),
        ("right", "0123...[6 characters left out]..."),
    ],
)
def test_results_are_truncated_on_their_side(side, text):
    assert shorten("0123456789", 4, side) == text
    assert shorten("0123456789", 5, side).replace("...[5 characters left out]...", "|") in (
        "|56789",
        "012|89",
        "01234|",
    )
    assert shorten("0123", 4, side) == "0123"
    assert unpack_result(pack_result("0123456789", 4, side), 2.0) == ToolResult(text, seconds=2.0)


def test_the_tool_python_runs_programs_in_the_sandbox(tmp_path):
    """A program gets nothing of an earlier one, and its end is said."""
    (tool,) = opened(tmp_path, ToolConfig(name="python", timeout=2, workers=2, kwargs={"memory_mib": 256}))
    try:
        assert tool.schema["function"]["parameters"]["required"] == ["code"]
        programs = {
            "x = 1; open('f', 'w').write('a'); print('a'); print('b')": ("a\nb", ""),
            "import os; print('f' in os.listdir(), 'x' in globals())": ("False False", ""),
            "print('before'); 1 / 0": ("before\nTraceback (most recent call last):", "error"),
            "while True: pass": ("Error: the program took longer than 2 s and was stopped", "timeout"),
            "a = 'a' * 10**10": ("Error: the program used more than 256 MiB of memory", "died"),
            "print('a' * 10**8)": ("aaa", "died"),
            "import os; os._exit(3)": ("Error: the program ended with an exit code that is not 0", "error"),
            "pass": ("(the program printed nothing)", ""),
            "def f(:": ("  File", "error"),
        }
        results = call(tool, *[{"code": code} for code in programs])
        for (code, (text, failure)), result in zip(programs.items(), results, strict=True):
            assert (result.text.startswith(text), result.failure) == (True, failure), (code, result)
        assert "ZeroDivisionError: division by zero" in results[2].text
        assert len(results[5].text) < 5000
    finally:
        tool.close()
    with pytest.raises(ConfigError, match=r"memory_mib=5 .*at least 64"):
        opened(tmp_path, ToolConfig(name="python", kwargs={"memory_mib": 5}))


def test_python_without_a_way_out_of_its_sandbox_reads_no_host(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tool,) = opened(tmp_path, ToolConfig(name="python", timeout=5, workers=1))
    try:
        if tool._registered._level == "none":  # pyright: ignore[reportAttributeAccessIssue]
            raise AssertionError("auto is never none")
        (result,) = call(tool, {"code": f"print(open('{tmp_path}/secret').read())"})
        assert result.failure == "error"
        assert "secret\n" not in result.text
    finally:
        tool.close()
