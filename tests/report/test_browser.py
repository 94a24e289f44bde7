"""The page as a person meets it, in a real browser: it draws, reads out, filters, and runs nothing a model wrote."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwgrpo.report.page import write_report
from tests.report.chromium import Browser

pytestmark = pytest.mark.slow

ATTACK = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def page(make_run) -> Path:
    """Report of 8 steps: reward 0.1 to 0.8, two groups of two completions per step, the last one truncated."""
    metrics = [{"step": 0, "val-core/quiz/reward/greedy": 0.25, "timing_s/testing": 1.0}]
    metrics += [
        {
            "step": step, "reward": step / 10, "response_length/mean": 5.0, "response_length/min": 1.0,
            "response_length/max": 9.0, "kl": 0.01 * step, "actor/entropy": 1.0, "odd/metric": 7.0,
            "timing_s/gen": 0.5, "timing_s/update_actor": 0.25, "timing_s/step": 1.0,
        }
        for step in range(1, 9)
    ]  # fmt: skip
    metrics.append({"step": 8, "val-core/quiz/reward/greedy": 0.75})
    completions = [
        {
            "step": step, "uid": f"0:{group}", "prompt": f"question {group}", "response": f"answer {step}-{group}-{i}",
            "reward": 1.0 if i else -0.5, "rewards": {"right": 1.0, "short": 0.5}, "advantage": 0.7 if i else -0.7,
            "length": 5, "finished": (step, group, i) != (8, 1, 1), "ground_truth": "42", "source": "quiz",
        }
        for step in range(1, 9) for group in range(2) for i in range(2)
    ]  # fmt: skip
    return report(make_run(metrics, completions))


def report(folder: Path) -> Path:
    write_report(folder, folder / "report.html")
    return folder / "report.html"


def chart(title: str) -> str:
    """A JavaScript expression for the chart of a title."""
    wanted = json.dumps(title)
    return f"[...document.querySelectorAll('.chart')].find((c) => c.querySelector('h3').textContent === {wanted})"


def readouts(browser: Browser, title: str) -> list[str]:
    return browser.evaluate(f"[...{chart(title)}.querySelectorAll('.item')].map((item) => item.textContent)")


def listed(browser: Browser) -> str:
    return browser.texts("[role=status]")[0]


def wait_for_count(browser: Browser, text: str) -> None:
    browser.wait_for(f"document.querySelector('[role=status]').textContent === {json.dumps(text)}", seconds=10)


def test_what_a_model_wrote_is_shown_and_not_run(browser: Browser, make_run):
    line = {
        "step": 1,
        "uid": ATTACK,
        "reward": 1.0,
        "rewards": {ATTACK: 1.0, "b": 0.0},
        "advantage": 0.0,
        "source": ATTACK,
    }
    line |= {"prompt": ATTACK, "response": ATTACK, "ground_truth": ATTACK, "extras": {ATTACK: ATTACK}}
    folder = make_run([{"step": 1, "reward": 1.0, f"rewards/{ATTACK}/mean": 1.0}], [line])
    (folder / "environment.json").write_text(json.dumps({ATTACK: ATTACK}))
    page = report(folder)
    for tab in ("curves", "groups", "settings"):
        browser.open(page, tab=tab)
        assert browser.evaluate("document.title") == "run · hwgrpo report"
        assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0
        assert browser.evaluate("document.scripts.length") == 3
        assert browser.complaints() == []
    browser.open(page, tab="groups")
    assert browser.texts(".completion pre.text")[0] == ATTACK
    assert browser.texts(".row .prompt") == [ATTACK]


@pytest.fixture
def trajectories(make_run) -> Path:
    """Report of a group: one trajectory that searched and was done, one that failed, and a single turn."""
    call = {"function": {"name": "search", "arguments": {"query": ATTACK, "k": 3}}}
    code = {"function": {"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}}
    found = "".join(f"{i}. line {i}\n" for i in range(40)) + "needle"
    messages = [
        {"role": "assistant", "content": ATTACK, "tool_calls": [call, code], "reasoning_content": "a thought"},
        {"role": "tool", "name": "search", "content": found},
        {"role": "tool", "name": "python", "content": ATTACK},
        {"role": "assistant", "content": "answer"},
    ]
    outcome = {"environment": "Lookup", "stop": "done", "failure": "", "turn_rewards": [-0.5, 1.5]}
    outcome |= {"calls": {"search": 1, "python": 1}, "failed_calls": {}, "messages": messages}
    failed = outcome | {"stop": "failed", "failure": f"Lookup.step {ATTACK}", "turn_rewards": [], "messages": []}
    single = outcome | {"turn_rewards": [1.0], "messages": messages[3:], "calls": {}}
    line = {"step": 1, "uid": "0:0", "prompt": "p", "response": "raw text", "reward": 1.0, "advantage": 0.0}
    lines = [{**line, "outcome": each, "finished": each is not failed} for each in (outcome, failed, single)]
    return report(make_run([{"step": 1, "reward": 1.0}], lines))


def test_a_trajectory_is_its_turns_with_calls_rewards_and_its_end(browser: Browser, trajectories: Path):
    browser.open(trajectories, tab="groups")
    assert browser.texts(".who") == ["policyreward −0.50", "toolsearch", "toolpython", "policyreward +1.50"]
    colors = "[...document.querySelectorAll('.turn')].map((e) => getComputedStyle(e).borderLeftColor)"
    first, second, third, last = browser.evaluate(colors)
    assert first == last != second == third
    assert browser.texts(".turn .call") == [
        f"search(\n  query={json.dumps(ATTACK)}\n  k=3\n)",
        "python(\n  code=\n    a = 1\n    print(a)\n)",
    ]
    assert browser.texts(".reasoning pre") == ["a thought"]
    assert browser.texts(".completion .stop") == ["done", "failed", "done"]
    assert browser.texts(".completion .about") == [
        "#1 · 0 tokens · 2 turns · 2 calls · Lookup",
        "#2 · 0 tokens · 1 turn · 2 calls · Lookup",
        "#3 · 0 tokens · 1 turn · Lookup",
    ]
    assert browser.texts(".failure") == [f"Lookup.step {ATTACK}"]
    assert browser.texts(".completion > pre.text") == ["raw text"] * 2
    assert browser.evaluate("document.title") == "run · hwgrpo report"
    assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert browser.complaints() == []


def test_long_observations_are_folded_and_open_by_a_click_or_for_what_was_searched(
    browser: Browser, trajectories: Path
):
    browser.open(trajectories, tab="groups")
    folded = "[...document.querySelectorAll('.turn .long')].map((e) => e.open)"
    assert browser.evaluate(folded) == [False]
    assert browser.texts(".long .first") == ["0. line 0\n1. line 1\n2. line 2"]
    assert browser.texts(".long u") == ["all 41 lines"]
    browser.click(".long summary")
    assert browser.evaluate(folded) == [True]
    browser.type("[type=search]", "needle")
    wait_for_count(browser, "1 group, 1 completion of 3")
    assert browser.evaluate(folded) == [True]
    assert browser.texts("mark") == ["needle"]
    for words, count in (("query=", 1), ("a thought", 1), ("lookup.step", 1), ("raw text", 2)):
        browser.type("[type=search]", words)
        wait_for_count(browser, f"1 group, {count} completion{'s' * (count > 1)} of 3")


def test_trajectories_are_filtered_by_their_end(browser: Browser, trajectories: Path, request):
    browser.open(trajectories, tab="groups")
    choice = "document.querySelector('[aria-label=\"why the trajectory ended\"]')"
    assert browser.evaluate(f"[...{choice}.options].map((each) => each.value)") == ["", "done", "failed"]
    browser.evaluate(f"{choice}.value = 'failed', {choice}.dispatchEvent(new Event('change'))")
    wait_for_count(browser, "1 group, 1 completion of 3")
    browser.open(request.getfixturevalue("page"), tab="groups")
    assert browser.evaluate(f"{choice}.hidden"), "a run of single turns has no such filter"


def test_the_policy_of_the_page_stops_a_script_that_is_not_its_own(browser: Browser, page: Path):
    browser.open(page)
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))"
    )
    assert browser.evaluate("document.title") == "run · hwgrpo report"
    assert "Content Security Policy" in browser.complaints()[0]


def test_the_page_loads_nothing_but_itself(browser: Browser, page: Path):
    for tab in ("curves", "groups", "settings"):
        browser.open(page, tab=tab)
        asked = [address for address in browser.requests() if address != "about:blank"]
        assert [address.partition("#")[0] for address in asked] == [page.resolve().as_uri()]
        assert browser.complaints() == []


def test_it_says_at_the_top_whether_the_run_learned_and_draws_the_curves_that_were_recorded(
    browser: Browser, page: Path
):
    browser.open(page, height=3000)
    assert browser.texts(".verdict h2") == ["Validation reward (quiz greedy) rose from 0.250 to 0.750"]
    assert "quiz greedy0.750+0.500 from 0.250" in browser.texts(".tile")
    titles = browser.texts(".chart h3")
    assert titles == ["Reward", "Response length", "Time per stage", "KL", "Entropy"]
    assert "Clip ratio" in browser.texts(".absent")[0]
    assert "Memory" in browser.texts(".absent")[0]
    assert browser.evaluate("[...document.querySelectorAll('.plot')].every((p) => p.querySelector('svg path'))")
    assert browser.evaluate(f"{chart('Reward')}.querySelectorAll('path.mark').length") == 2
    assert browser.evaluate(f"{chart('Time per stage')}.querySelectorAll('path.stack').length") == 3


def test_a_curve_is_drawn_where_its_axes_say(browser: Browser, page: Path):
    browser.open(page)
    points = browser.evaluate(f"{chart('Reward')}.querySelector('path.line').getAttribute('d')")
    drawn = [[float(number) for number in point.split()] for point in points[1:].split("L")]
    labels = browser.evaluate(
        f"[...{chart('Reward')}.querySelectorAll('.grid text')]"
        ".map((t) => [t.textContent, +t.getAttribute('x'), +t.getAttribute('y')])"
    )
    assert [text for text, _, _ in labels] == ["0", "0.2", "0.4", "0.6", "0.8", *"012345678"]
    place_y = {text: y - 3.5 for text, _, y in labels[:5]}
    place_x = {text: x for text, x, _ in labels[5:]}
    assert place_y["0"] > place_y["0.8"] > 0  # up is more
    assert len(drawn) == 8  # step 0 has a validation only
    assert [drawn[i][1] for i in (1, 3, 5, 7)] == pytest.approx(
        [place_y[t] for t in ("0.2", "0.4", "0.6", "0.8")], abs=1
    )
    assert [x for x, _ in drawn] == pytest.approx([place_x[t] for t in "12345678"], abs=0.2)


@pytest.mark.parametrize("steps", [8, 600])
def test_stages_stand_on_one_another_as_bars_in_a_short_run_and_as_areas_in_a_long_one(
    browser: Browser, make_run, steps: int
):
    values = {"timing_s/gen": 0.5, "timing_s/update_actor": 0.25, "timing_s/step": 1.0}
    page = report(make_run([{"step": step, **values} for step in range(1, steps + 1)]))
    browser.open(page)
    boxes = browser.evaluate(
        f"[...{chart('Time per stage')}.querySelectorAll('.stack')]"
        ".map((p) => [p.getBBox().y, p.getBBox().height, p.getAttribute('d').split('M').length - 1])"
    )
    (gen, gen_height, *_), (update, update_height, *_), (other, other_height, *_) = boxes
    assert update + update_height == pytest.approx(gen, abs=0.2)
    assert other + other_height == pytest.approx(update, abs=0.2)
    assert [update_height, other_height] == pytest.approx([gen_height / 2] * 2, abs=0.2)
    assert gen_height > 50
    assert [shapes for *_, shapes in boxes] == [8 if steps == 8 else 1] * 3


def test_pointing_at_a_curve_reads_out_that_step_in_every_chart(browser: Browser, page: Path):
    browser.open(page)
    assert readouts(browser, "Reward") == ["training0.800", "validation greedy0.750"]
    browser.mouse(*browser.middle(".plot svg"))
    assert browser.texts(".chart .at")[0] == "step 4"
    assert readouts(browser, "Reward") == ["training0.400", "validation greedy–"]
    assert readouts(browser, "KL") == ["KL0.04"]
    assert readouts(browser, "Time per stage") == ["gen500 ms", "update_actor250 ms", "other250 ms"]
    browser.mouse(5, 5)
    assert browser.texts(".chart .at")[0] == ""


def test_arrow_keys_move_between_steps_and_are_announced(browser: Browser, page: Path):
    browser.open(page)
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.key("ArrowLeft")
    assert browser.texts("[aria-live]") == ["Reward, step 7: training 0.700, validation greedy –"]
    browser.key("Home")
    assert browser.texts(".chart .at")[0] == "step 0"
    label = browser.evaluate("document.querySelector('.plot').getAttribute('aria-label')")
    assert "training from 0.100 to 0.800" in label


def test_dragging_zooms_every_chart_and_a_button_shows_all_again(browser: Browser, page: Path):
    browser.open(page, height=1200)
    x, y = browser.middle(".plot svg")
    browser.mouse(x, y, "mouseMoved", "mousePressed")
    browser.mouse(x + 200, y)
    browser.mouse(x + 200, y, "mouseReleased")
    ticks = browser.evaluate(f"[...{chart('KL')}.querySelectorAll('.tick + text')].map((t) => t.textContent)")
    assert ticks == ["4", "5", "6"]
    browser.evaluate(
        "[...document.querySelectorAll('.chartbar button')].find((b) => b.textContent === 'Show all steps').click()"
    )
    ticks = browser.evaluate(f"[...{chart('KL')}.querySelectorAll('.tick + text')].map((t) => t.textContent)")
    assert (ticks[0], ticks[-1]) == ("0", "8")


def test_smoothing_draws_the_average_over_the_faint_curve(browser: Browser, page: Path):
    browser.open(page)
    browser.click("#smooth")
    assert browser.evaluate(f"{chart('Reward')}.querySelectorAll('path.faint').length") == 1
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.key("Home")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    # weight 0.8, start's bias removed: (0.8 * 0.2 * 0.1 + 0.2 * 0.2) / (1 - 0.8^2)
    assert readouts(browser, "Reward")[0] == "training0.156 (0.200)"


def test_a_schedule_is_drawn_as_it_was(browser: Browser, make_run):
    rows = [{"step": k, "reward": 0.1 * (k % 3), "actor/lr": 1e-5 * k} for k in range(1, 9)]
    browser.open(report(make_run(rows)))
    browser.click("#smooth")
    faint = "[...document.querySelectorAll('.chart')].filter((c) => c.querySelector('path.faint'))"
    assert browser.evaluate(f"{faint}.map((c) => c.querySelector('h3').textContent)") == ["Reward"]


def test_a_pinned_step_leads_to_its_groups(browser: Browser, page: Path):
    browser.open(page)
    x, y = browser.middle(".plot svg")
    browser.mouse(x, y, "mouseMoved", "mousePressed", "mouseReleased")
    browser.click(".chartbar .primary")
    assert listed(browser) == "2 groups, 4 completions of 32"
    assert browser.texts(".row .muted") == ["step 4", "step 4"]


def test_a_group_shows_prompt_and_completions_side_by_side_with_reward_and_advantage(browser: Browser, page: Path):
    browser.open(page, tab="groups")
    assert listed(browser) == "16 groups, 32 completions"
    assert browser.texts(".detail pre.text")[:2] == ["question 0", "42"]
    assert browser.texts(".completion .pair") == ["reward -0.5", "advantage −0.70", "reward 1", "advantage +0.70"]
    assert browser.texts(".completion pre") == ["answer 1-0-0", "answer 1-0-1"]
    assert browser.texts(".completion .parts")[0] == "right1short0.5"
    tops = browser.evaluate("[...document.querySelectorAll('.completion')].map((c) => c.getBoundingClientRect().top)")
    assert tops[0] == tops[1]
    browser.click(".row:nth-child(4)")
    assert browser.texts(".completion pre") == ["answer 2-1-0", "answer 2-1-1"]
    browser.evaluate("document.querySelector('.list').focus()")
    browser.key("ArrowUp")
    assert browser.texts(".completion pre") == ["answer 2-0-0", "answer 2-0-1"]


def test_filters_by_step_reward_end_and_words_leave_the_groups_that_meet_all(browser: Browser, page: Path):
    browser.open(page, tab="groups")
    browser.type("[aria-label='lowest step']", "7")
    wait_for_count(browser, "4 groups, 8 completions of 32")
    browser.type("[aria-label='lowest reward']", "0")
    wait_for_count(browser, "4 groups, 4 completions of 32")
    browser.type("[type=search]", "ANSWER 8")
    wait_for_count(browser, "2 groups, 2 completions of 32")
    assert browser.texts("mark") == ["answer 8"] * 2
    end = "document.querySelector('[aria-label=\"finished or truncated\"]')"
    browser.evaluate(f"{end}.value = '0', {end}.dispatchEvent(new Event('change'))")
    wait_for_count(browser, "1 group, 1 completion of 32")
    assert browser.texts(".completion:first-child .badge") == ["truncated"]
    assert "does not meet the filter" in browser.texts(".completion.missed")[0]
    browser.type("[type=search]", "no such words")
    wait_for_count(browser, "0 groups, 0 completions of 32")
    assert browser.texts(".detail") == ["No group meets the filter."]
    browser.click("button[type=reset]")
    wait_for_count(browser, "16 groups, 32 completions")
    browser.type("[aria-label='highest reward']", "-0.5")
    wait_for_count(browser, "16 groups, 16 completions of 32")


@pytest.mark.parametrize("words", ["(.*", "$5", "a-b", "[c]^{d}", "x|y?", "\\ /", "+1"])
def test_words_are_looked_for_as_they_stand_and_not_as_a_pattern(browser: Browser, make_run, words: str):
    line = {"step": 1, "reward": 1.0, "advantage": 0.0, "prompt": "p"}
    texts = [f"before {words} after", "5 a b c d x y ab 1"]
    lines = [{**line, "uid": str(i), "response": text} for i, text in enumerate(texts)]
    browser.open(report(make_run([{"step": 1, "reward": 1.0}], lines)), tab="groups")
    browser.type("[type=search]", words)
    wait_for_count(browser, "1 group, 1 completion of 2")
    assert browser.texts("mark") == [words]


def test_a_long_completion_is_scrolled_to_the_words_that_were_searched_for(browser: Browser, make_run):
    line = {
        "step": 1,
        "uid": "0:1",
        "prompt": "p",
        "reward": 1.0,
        "advantage": 0.0,
        "response": "word " * 900 + "needle",
    }
    browser.open(report(make_run([{"step": 1, "reward": 1.0}], [line])), tab="groups")
    browser.type("[type=search]", "needle")
    browser.wait_for("document.querySelector('mark') !== null")
    box, mark = (browser.middle(place)[1] for place in (".completion pre", "mark"))
    assert abs(box - mark) < 340 / 2


def test_the_environment_is_shown_without_json(browser: Browser, make_run):
    folder = make_run([{"step": 1, "reward": 1.0}])
    variable = {"PYTORCH_CUDA_ALLOC_CONFIGURATION_OPTIONS": {"value": "expandable_segments:True", "set by": "hwgrpo"}}
    record = {"torch": "2.13.0", "attention": {"selected": "sdpa", "skipped": {}}, "variables": variable}
    (folder / "environment.json").write_text(json.dumps(record))
    browser.open(report(folder), tab="settings")
    cells = browser.texts(".columns td")
    assert cells[:6] == ["torch", "2.13.0", "attention.selected", "sdpa", "attention.skipped", "–"]
    hidden = "[...document.querySelectorAll('.columns .scroll')].map((box) => box.scrollWidth - box.clientWidth)"
    assert max(browser.evaluate(hidden)) <= 0, "a table is wider than its card"


def test_resumes_are_lines_in_the_curves_and_rows_of_a_table(browser: Browser, make_run):
    folder = make_run([{"step": step, "reward": step / 10} for step in range(1, 9)])
    stage = {"name": "log-probs", "error": 2e-6, "tolerance": 8e-6}
    machines = {"cpu": {"backend": "cpu", "device": "x86_64", "ranks": 2}, "npu": {"backend": "npu", "torch": "2.13.0"}}
    resumes = [
        {"step": 3, "from": machines["cpu"], "to": machines["npu"], "passed": True, "stages": [stage]},
        {
            "step": 6,
            "from": machines["npu"],
            "to": machines["cpu"],
            "passed": False,
            "stages": [stage | {"error": "NaN"}],
        },
        {"step": 7, "from": None, "to": machines["cpu"], "passed": None, "stages": []},
    ]
    (folder / "environment.json").write_text(json.dumps({"resumes": resumes}))
    browser.open(report(folder), height=2000)
    lines = f"[...{chart('Reward')}.querySelectorAll('.resume')]"
    assert browser.evaluate(f"{lines}.map((line) => line.getAttribute('class'))") == [
        "resume muted",
        "resume bad",
        "resume muted",
    ]
    places = browser.evaluate(f"{lines}.map((line) => Number(line.getAttribute('x1')))")
    assert (places[1] - places[0]) / (places[2] - places[1]) == pytest.approx(3, rel=1e-3)
    cells = browser.texts(".resumes td")
    assert [cells[i : i + 4] for i in range(0, len(cells), 4)] == [
        ["3", "cpu (x86_64, ranks: 2)", "npu (torch 2.13.0)", "log-probs: 2e-06, 0.25 of what rounding explains"],
        ["6", "npu (torch 2.13.0)", "cpu (x86_64, ranks: 2)", "log-probs: not finite"],
        ["7", "not recorded", "cpu (x86_64, ranks: 2)", "not compared"],
    ]
    assert browser.complaints() == []


def test_configuration_marks_what_differs_and_every_metric_can_be_found(browser: Browser, page: Path):
    browser.open(page, tab="settings")
    assert browser.texts(".differs td")[:3] == ["optim.lr", "0.5", "1e-06"]
    assert listed(browser) == "2 of 3 settings"  # it opens on what differs from the defaults
    browser.click("#changed")
    assert listed(browser) == "3 of 3 settings"
    browser.open(page)
    browser.click("details.all summary")
    browser.type("details.all input", "odd/")
    browser.wait_for("document.querySelectorAll('details.all .chart').length === 1")
    assert browser.texts("details.all h3") == ["odd/metric"]


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_trajectories_fit_every_screen(browser: Browser, trajectories: Path, width: int):
    browser.open(trajectories, width=width, height=844, tab="groups")
    browser.click(".row")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('.turn')].filter((e) => e.scrollWidth > e.clientWidth).length"
    assert browser.evaluate(wide) == 0


@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("tab", ["curves", "groups", "settings"])
def test_the_page_fits_a_phone_a_laptop_and_a_wide_screen(browser: Browser, page: Path, width: int, tab: str):
    browser.open(page, width=width, height=844, tab=tab)
    assert browser.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [1280, 1500, 1920])
def test_tiles_stand_in_line_and_no_chart_is_left_alone_beside_a_gap(browser: Browser, make_run, width: int):
    steps = [
        {"step": step, "reward": 0.5, "response_length/mean": 5.0, "response_length/clip_ratio": 1.0,
         "perf/max_memory_allocated_gb": 4.0, "kl": 0.1, "actor/lr": 1.0, "actor/grad_norm": 1.0,
         "perf/throughput": 9.0, "rewards/right/mean": 0.5, "rewards/short/mean": 0.1}
        for step in range(1, 9)
    ]  # fmt: skip
    browser.open(report(make_run(steps)), width=width)
    tops = "[...new Set([...document.querySelectorAll('.tile .big')].map((e) => e.getBoundingClientRect().top))].length"
    rows = "[...new Set([...document.querySelectorAll('.tile')].map((e) => e.getBoundingClientRect().top))].length"
    assert browser.evaluate(tops) == browser.evaluate(rows)
    assert {"right", "short"} <= set(browser.texts(".chart h3"))
    edges = browser.evaluate(
        "[document.querySelector('.charts'), ...document.querySelectorAll('.charts > .chart')]"
        ".map((e) => e.getBoundingClientRect()).map((box) => [Math.round(box.top), Math.round(box.right)])"
    )
    ends = dict(sorted(edges[1:]))  # row -> right edge of its last chart
    assert set(ends.values()) == {edges[0][1]}


def test_printing_draws_what_lies_below_the_fold_and_adds_the_settings(browser: Browser, page: Path):
    browser.open(page, height=300)
    count = "document.querySelectorAll('.plot svg path.line, .plot svg path.stack').length"
    seen = f"[{count}, document.querySelector('#panel-settings').hidden]"
    before, hidden = browser.evaluate(seen)
    assert hidden
    browser.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {seen}; }}), 1")
    browser.send("Page.printToPDF")
    drawn, hidden = browser.evaluate("window.printed")
    assert drawn > before
    assert not hidden
    assert browser.evaluate("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg path'))")
    assert browser.evaluate("document.querySelector('#panel-settings').hidden"), "the screen is as it was"


def test_a_destroyed_run_is_no_green_success(browser: Browser, make_run):
    values = {"kl": 9.9, "response_length/clip_ratio": 1.0}
    steps = [{"step": 0, "val-core/quiz/reward/greedy": 0.59}]
    steps += [{"step": step, "reward": 0.0, **({} if step < 6 else values)} for step in range(1, 11)]
    steps += [{"step": 10, "val-core/quiz/reward/greedy": 0.0}]
    folder = make_run(steps)
    told = [{"step": step, "name": name, "seen": "s", "meaning": "m", "remedies": []}
            for step, name in ((6, "truncation"), (7, "KL exploding"), (9, "truncation"))]  # fmt: skip
    (folder / "warnings.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    (folder / "summary.json").write_text(json.dumps({"status": "completed", "steps": 10, "validation": []}))
    browser.open(report(folder))
    assert browser.texts(".verdict.bad h2") == [
        "The run collapsed: validation reward (quiz greedy) fell from 0.590 to 0.000"
    ]
    assert browser.texts(".badge") == ["completed"]
    assert browser.texts(".badge.good") == []
    assert browser.texts(".warnings h3") == ["2 warnings"]
    assert [text[:20] for text in browser.texts(".warnings summary")] == [
        "step 9 · truncation ",
        "step 7 · KL explodin",
    ]
    assert "at its clamp of 10 from step 6" in browser.evaluate(f"{chart('KL')}.textContent")


def test_groups_are_headed_by_the_last_user_message(browser: Browser, make_run):
    turn = {"step": 1, "uid": "0:0", "response": "4", "reward": 1.0, "rewards": {}, "advantage": 0.0, "length": 1}
    prompt = "<system>You are a calculator.</system><user>What is 2+2?</user>"
    browser.open(
        report(make_run([{"step": 1, "reward": 1.0}], [turn | {"prompt": prompt, "question": "What is 2+2?"}])),
        tab="groups",
    )
    assert browser.texts(".row .prompt") == ["What is 2+2?"]
    assert prompt in browser.texts(".detail pre.text")


def test_on_a_phone_a_chosen_group_takes_the_place_of_the_list(browser: Browser, page: Path):
    browser.open(page, width=390, height=844, tab="groups")
    seen = "[...document.querySelectorAll('.list, .detail')].map((e) => e.clientHeight > 0)"
    assert browser.evaluate(seen) == [True, False]
    browser.click(".row:nth-child(2)")
    assert browser.evaluate(seen) == [False, True]
    browser.click(".back")
    assert browser.evaluate(seen) == [True, False]


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser, page: Path):
    color = "getComputedStyle(document.body).backgroundColor"
    browser.open(page, dark=False)
    light = browser.evaluate(color)
    browser.open(page, dark=True)
    dark = browser.evaluate(color)
    assert light != dark
    browser.click(".theme")
    assert browser.evaluate(color) == light
    browser.evaluate("localStorage.clear()")


def test_only_the_groups_in_sight_are_made_of_ten_thousand_completions(browser: Browser, make_run):
    line = {"prompt": "p", "response": "word " * 200, "reward": 1.0, "advantage": 0.0, "length": 200, "finished": True}
    lines = [{"step": n // 20, "uid": str(n // 8), **line} for n in range(10_000)]
    browser.open(report(make_run([{"step": 1, "reward": 1.0}], lines)), tab="groups")
    groups = browser.evaluate("document.querySelector('.row').getAttribute('aria-setsize')")
    assert int(groups) >= 1250
    assert browser.evaluate("document.querySelectorAll('.row').length") < 30
    browser.evaluate("document.querySelector('.list').focus()")
    browser.key("End")
    assert browser.texts(".row.chosen .muted") == ["step 499"]
    assert browser.evaluate("document.querySelectorAll('.row').length") < 30


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_hardly_begun_is_drawn_without_an_error(browser: Browser, make_run, steps: int):
    folder = make_run(
        [{"step": step, "reward": 0.5, "timing_s/gen": 1.0, "timing_s/step": 1.0} for step in range(1, steps + 1)]
    )
    for tab in ("curves", "groups", "settings"):
        browser.open(report(folder), tab=tab)
        assert browser.complaints() == []
    browser.open(report(folder))
    expected = "No step has been logged yet" if steps == 0 else f"Too early to judge: {steps} step"
    assert browser.texts(".verdict h2")[0].startswith(expected)
    assert browser.evaluate("document.querySelectorAll('.chart path.line, .chart circle.dot').length") == (
        1 if steps else 0
    )
