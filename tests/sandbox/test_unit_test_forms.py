"""Forms of unit tests, each with a right and a wrong program: which verdicts the reward `code` reaches."""

import ast

import pytest

from hwgrpo.errors import DataError
from hwgrpo.sandbox.assertions import Assertions, walk
from hwgrpo.sandbox.code_reward import judge
from hwgrpo.sandbox.counted_assertions import compile_counted
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.sandbox_pool import SandboxPool
from hwgrpo.sandbox.unit_tests import read_tests

RIGHT = """
import asyncio
LIMIT = 10
def add(a, b):
    if a is None: raise ValueError("no number")
    return a + b
def div(a, b): return a / b
def double(numbers): numbers[:] = [2 * each for each in numbers]
def table(): return {"a": [1, 2]}
async def later(x):
    await asyncio.sleep(0)
    return x + 1
class Counter:
    def __init__(self): self.n = 0
    def up(self):
        self.n += 1
        return self.n
class Solution:
    def add(self, a, b): return a + b
def sum(a, b): return a + b
def closed(): assert False
def assert_true(x): pass
class Holder:
    def assert_true(self, x): pass
def fail(x=None): pass
def total(counter): return counter.n
def kind(value, of): return isinstance(value, of)
def stopped(): raise StopIteration
"""
WRONG = """
LIMIT = 11
def add(a, b): return 0
def div(a, b): return 0.0
def double(numbers): pass
def table(): return {}
async def later(x): return x
class Counter:
    n = 5
    def up(self): return 5
class Solution:
    def add(self, a, b): return 0
def sum(a, b): return 0
def closed(): pass
def total(counter): return 0
def kind(value, of): return None
"""
ENTRY = {"entry_point": "add"}

FORMS = {
    "an assert": "assert add(1, 2) == 3",
    "a list of asserts": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
    "a list with imports of its own": ["import math", "assert math.isclose(add(1, 2), 3)"],
    "a list with steps between its asserts": [
        "n = [1]",
        "double(n)",
        "assert n == [2]",
        "double(n)",
        "assert n == [4]",
    ],
    "a list of test functions": ["def test(): assert add(1, 2) == 3", "def test(): assert add(2, 2) == 4"],
    "check(candidate)": (
        """
def check(candidate):
    assert candidate(1, 2) == 3
""",
        ENTRY,
    ),
    "check(candidate) with constants, too": (
        """
METADATA = {}
def check(candidate):
    assert True, 'always'
    assert candidate(1, 2) == 3
""",
        ENTRY,
    ),
    "check(candidate) that is called": """
def check(candidate):
    assert candidate(1, 2) == 3
check(add)
""",
    "check(candidate) of a method": (
        """
def check(candidate):
    assert candidate(1, 2) == 3
""",
        {"entry_point": "Solution().add"},
    ),
    "async check(candidate)": (
        """
async def check(candidate):
    assert await candidate(1) == 2
""",
        {"entry_point": "later"},
    ),
    "arguments and results": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
    "a test function": """
def test_add():
    assert add(1, 2) == 3
""",
    "a test function from solution": """
from solution import add as plus
def test_add():
    assert plus(1, 2) == 3
""",
    "a test function of the module solution": """
import solution
def test_add():
    assert solution.add(1, 2) == 3
""",
    "a test function with a capital": """
def testAdd():
    assert add(1, 2) == 3
""",
    "a test function with the candidate": (
        """
def test_add(candidate):
    assert candidate(1, 2) == 3
""",
        ENTRY,
    ),
    "a helper that test functions call": """
def same(a, b, c):
    assert add(a, b) == c
def test_add():
    same(1, 2, 3)
""",
    "a helper with a test's name": """
def test_case(a, b, c):
    assert add(a, b) == c
def test_all():
    test_case(1, 2, 3)
""",
    "functions that the source calls": """
def run():
    assert add(1, 2) == 3
run()
""",
    "functions that its main part calls": """
def run():
    assert add(1, 2) == 3
if __name__ == '__main__':
    run()
    print('ok')
""",
    "asserts in its main part": """
if __name__ == '__main__':
    assert add(1, 2) == 3
""",
    "tests below if True": """
if True:
    def test_add():
        assert add(1, 2) == 3
""",
    "tests in its main part": """
if __name__ == '__main__':
    def test_add():
        assert add(1, 2) == 3
    test_add()
""",
    "tests below try": """
try:
    import math
    def test_add():
        assert add(1, 2) == 3
except ImportError:
    pass
""",
    "an async test function": """
async def test_later():
    assert await later(1) == 2
""",
    "an async test function with asyncio": """
import asyncio
async def test_later():
    assert await asyncio.gather(later(1), later(2)) == [2, 3]
""",
    "asyncio.run in a test function": """
import asyncio
def test_later():
    assert asyncio.run(later(1)) == 2
""",
    "a generator": """
def test_add():
    for n in range(3):
        yield n
        assert add(n, 1) == n + 1
""",
    "a generator of calls": """
def same(a, b):
    assert add(a, 1) == b
def test_add():
    yield same, 1, 2
""",
    "asserts of changed arguments": """
def test_double():
    n = [1, 2]
    double(n)
    assert n == [2, 4]
""",
    "asserts of collected results": """
out = []
for n in range(3):
    out.append(add(n, 1))
assert out == [1, 2, 3]
""",
    "a flag that is asserted": """
ok = True
for n in range(3):
    if add(n, 1) != n + 1:
        ok = False
assert ok
""",
    "all() of results": "assert all(add(a, b) == c for a, b, c in [(1, 2, 3), (2, 2, 4)])",
    "a global value": "assert LIMIT == 10",
    "objects with a state": """
def test_up():
    c = Counter()
    c.up()
    assert c.up() == 2 and c.n == 2
""",
    "raise instead of assert": """
def test_add():
    if add(1, 2) != 3:
        raise ValueError('wrong')
""",
    "an expected exception": """
def test_none():
    try:
        add(None, 1)
        assert False
    except ValueError:
        pass
""",
    "an expected exception with else": """
try:
    add(None, 1)
except ValueError:
    pass
else:
    raise AssertionError('nothing raised')
""",
    "any expected exception": """
try:
    add(None, 1)
    assert False, 'nothing raised'
except Exception:
    pass
""",
    "an exception that is asserted": """
def test_none():
    try:
        add(None, 1)
    except ValueError as error:
        assert 'no number' in str(error)
    else:
        assert False
""",
    "a built-in function's name": (
        """
def check(candidate):
    assert candidate(1, 2) == 3
""",
        {"entry_point": "sum"},
    ),
    "asserts of a built-in function's name": (
        ["assert sum(1, 2) == 3"],
        {"entry_point": "sum"},
    ),
    "unittest": """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
""",
    "unittest with main": """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
if __name__ == '__main__':
    unittest.main()
""",
    "unittest with a call of main": """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertTrue(add(1, 2) == 3)
unittest.main()
""",
    "unittest in its main part": """
import unittest
if __name__ == '__main__':
    class TestAdd(unittest.TestCase):
        def test_add(self):
            self.assertEqual(add(1, 2), 3)
    unittest.main()
""",
    "unittest, imported by name": """
from unittest import TestCase as Case, main
class TestAdd(Case):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
main()
""",
    "unittest with setUp": """
import unittest
class TestAdd(unittest.TestCase):
    def setUp(self):
        self.made = add(1, 2)
    def tearDown(self):
        del self.made
    def test_add(self):
        self.assertEqual(self.made, 3)
""",
    "unittest with setUpClass": """
import unittest
class TestAdd(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.made = add(1, 2)
    @classmethod
    def tearDownClass(cls):
        cls.made = None
    def test_one(self):
        self.assertEqual(self.made, 3)
    def test_two(self):
        self.assertEqual(self.made + 1, 4)
""",
    "unittest with an assertion in tearDownClass": """
import unittest
class TestAdd(unittest.TestCase):
    made = []
    def test_add(self):
        self.made.append(add(1, 2))
        self.assertTrue(self.made)
    @classmethod
    def tearDownClass(cls):
        assert cls.made == [3]
""",
    "unittest with subTest": """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertEqual(add(n, 1), n + 1)
""",
    "unittest with assertRaises": """
import unittest
class TestAdd(unittest.TestCase):
    def test_none(self):
        with self.assertRaises(ValueError):
            add(None, 1)
""",
    "unittest with assertRaises of a call": """
import unittest
class TestAdd(unittest.TestCase):
    def test_none(self):
        self.assertRaisesRegex(ValueError, 'no number', add, None, 1)
""",
    "unittest with assertAlmostEqual": """
import unittest
class TestAdd(unittest.TestCase):
    def test_div(self):
        self.assertAlmostEqual(div(1, 3), 0.3333333)
""",
    "unittest with addCleanup": """
import unittest
class TestAdd(unittest.TestCase):
    def test_double(self):
        n = [1]
        self.addCleanup(lambda: self.assertEqual(n, [2]))
        double(n)
        self.assertTrue(n)
""",
    "unittest with a base class": """
import unittest
class Base(unittest.TestCase):
    def same(self, a, b, c):
        self.assertEqual(add(a, b), c)
class TestAdd(Base):
    def test_add(self):
        self.same(1, 2, 3)
""",
    "unittest with a mixin": """
import unittest
class Mixin:
    def test_add(self):
        self.assertEqual(self.call(1, 2), 3)
class TestAdd(Mixin, unittest.TestCase):
    call = staticmethod(add)
""",
    "unittest, async": """
import unittest
class TestLater(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.x = await later(1)
    async def test_later(self):
        self.assertEqual(self.x, 2)
""",
    "a class of pytest": """
class TestAdd:
    def test_add(self):
        assert add(1, 2) == 3
""",
    "a class of pytest in another": """
class TestOuter:
    class TestInner:
        def test_add(self):
            assert add(1, 2) == 3
""",
    "a class of pytest with setup_method": """
class TestAdd:
    def setup_method(self, method):
        self.n = 2
    def test_add(self):
        assert add(1, self.n) == 3
""",
    "a class of pytest with setup_class": """
class TestAdd:
    @classmethod
    def setup_class(cls):
        cls.made = add(1, 2)
    def test_add(self):
        assert self.made == 3
""",
    "variables named like modules and built-in functions": """
def test_add():
    sum = add(1, 2)
    array = [sum]
    double(array)
    array.sort()
    assert sum == 3 and array == [6]
""",
    "an AssertionError of the program": """
def test_closed():
    try:
        closed()
    except AssertionError:
        pass
    else:
        raise ValueError('nothing raised')
""",
    "attributes that tests set": """
def test_up():
    c = Counter()
    c.n = 4
    assert c.up() == 5 and total(c) == 5
""",
    "a type as an argument and a result": "assert kind(1, int) and kind('', str) and type(kind(1, str)) is bool",
    "a built-in function beside one of its name": (
        """
def check(candidate):
    assert candidate(1, 2) == sum([1, 2])
""",
        {"entry_point": "sum"},
    ),
    "unittest with setUpModule": """
import unittest
made = []
def setUpModule():
    made.append(add(1, 2))
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(made, [3])
""",
    "pytest with setup_module": """
def setup_module(module):
    module.made = add(1, 2)
def teardown_module():
    assert made == 3
def test_add():
    assert made == 3
""",
    "unittest with runTest": """
import unittest
class TestAdd(unittest.TestCase):
    def runTest(self):
        self.assertEqual(add(1, 2), 3)
""",
    "unittest's assertions in a function": """
import unittest
case = unittest.TestCase()
def test_add():
    case.assertEqual(add(1, 2), 3)
""",
    "an assertion function that has an alias": """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        assertEqual = self.assertEqual
        assertEqual(add(1, 2), 3)
""",
    "inputs and results that a helper compares": (
        """
def assertion(out, exp, atol):
    exact = out == exp
    if isinstance(exp, float):
        assert abs(out - exp) <= atol
    else:
        assert exact, f"out: {out}, exp: {exp}"
def check(candidate):
    inputs = [[1, 2], [0.1, 0.2]]
    results = [3, 0.3]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 1e-06)
""",
        ENTRY,
    ),
    "unittest without its import": """
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
""",
    "pytest.raises": """
import pytest
def test_none():
    with pytest.raises(ValueError, match='no num'):
        add(None, 1)
""",
    "pytest.raises with its exception": """
import pytest
def test_none():
    with pytest.raises(ValueError) as caught:
        add(None, 1)
    assert 'number' in str(caught.value)
""",
    "pytest.approx": """
import pytest
def test_div():
    assert div(1, 3) == pytest.approx(1 / 3)
""",
    "pytest.approx of a list": """
from pytest import approx
def test_div():
    assert [div(1, 3), 1] == approx([1 / 3, 1])
""",
    "pytest.mark.parametrize": """
import pytest
@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (2, 2, 4)])
def test_add(a, b, c):
    assert add(a, b) == c
""",
    "pytest.mark.parametrize twice, with param": """
import pytest
@pytest.mark.parametrize('a', [1, pytest.param(2, id='two')])
@pytest.mark.parametrize(['b'], [(3,), (4,)], ids=str)
def test_add(a, b):
    assert add(a, b) == a + b
""",
    "pytest.mark.parametrize of a class": """
import pytest
@pytest.mark.parametrize('a', [1, 2])
class TestAdd:
    def test_add(self, a):
        assert add(a, 1) == a + 1
""",
    "other marks of pytest": """
import pytest
@pytest.mark.slow
@pytest.mark.timeout(5)
@pytest.mark.skipif(False, reason='never')
def test_add():
    assert add(1, 2) == 3
""",
    "an async test with a mark": """
import pytest
@pytest.mark.asyncio
async def test_later():
    assert await later(1) == 2
""",
    "pytest.fixture": """
import pytest
@pytest.fixture
def made():
    return add(1, 2)
def test_add(made):
    assert made == 3
""",
    "pytest.fixture that yields and uses another": """
import pytest
@pytest.fixture(scope='module')
def one():
    return 1
@pytest.fixture(name='made')
def _made(one):
    yield add(one, 2)
def test_add(made):
    assert made == 3
""",
    "pytest.fixture with autouse": """
import pytest
seen = []
@pytest.fixture(autouse=True)
def made():
    seen.append(add(1, 2))
def test_add():
    assert seen == [3]
""",
    "pytest.fixture of a class": """
import pytest
class TestAdd:
    @pytest.fixture
    def made(self):
        return add(1, 2)
    def test_add(self, made):
        assert made == 3
""",
    "pytest.fail": """
import pytest
def test_add():
    if add(1, 2) != 3:
        pytest.fail('wrong')
""",
    "a test that asserts nothing beside one that does": """
def test_smoke():
    table()["a"]
def test_add():
    assert add(1, 2) == 3
""",
    "a test with nothing but a try that fails where it raises": """
import unittest
class TestTable(unittest.TestCase):
    def test_table(self):
        try:
            table()["a"]
        except Exception as error:
            self.fail(error)
""",
    "a try that fails where it raises one of several exceptions": """
def test_table():
    try:
        table()["a"]
    except KeyError:
        raise AssertionError("no a")
    except Exception:
        pass
""",
    "finally with a loop and a function of its own": """
def test_add():
    try:
        assert add(1, 2) == 3
    finally:
        for _ in range(2):
            break
        key = lambda x: x
        def unused():
            return key
""",
    "unittest.mock that nothing uses": """
import unittest.mock
from unittest.mock import patch, MagicMock as Mock
from unittest import mock
def test_add():
    assert add(1, 2) == 3
""",
    "a method of pytest with the candidate": (
        """
class TestAdd:
    def test_add(self, candidate):
        assert candidate(1, 2) == 3
""",
        ENTRY,
    ),
    "check(candidate) with a default": (
        """
def check(candidate=None):
    assert candidate(1, 2) == 3
""",
        ENTRY,
    ),
    "a sum of many terms": f"assert add(1, 2) + {' + '.join(['0'] * 330)} == 3",
    "results that threads get": """
from concurrent.futures import ThreadPoolExecutor
def test_add():
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda n: add(n, 1), range(300)))
    assert made == list(range(1, 301))
""",
    "skipped tests beside others": """
import pytest
@pytest.mark.skip(reason='slow')
def test_slow():
    assert add(1, 2) == 99
@pytest.mark.xfail
def test_fails():
    assert add(1, 2) == 99
def test_add():
    assert add(1, 2) == 3
""",
}
"""Form -> tests, or tests and the columns beside them."""

NOT_PASSED = {
    "an assertion that is not reached": (
        """
def test_add():
    for n in []:
        assert add(n, 1) == n
""",
        "no_assertion",
    ),
    "an early return": (
        """
def test_add():
    if add(1, 2) != 4:
        return
    assert add(1, 2) == 4
""",
        "no_assertion",
    ),
    "a parameter that is no value of the program": (
        """
def same(x):
    assert x == 1
same(1)
LIMIT
""",
        "no_assertion",
    ),
    "a generator that nothing runs": (
        """
def run():
    yield
    assert add(1, 2) == 3
run()
""",
        "no_assertion",
    ),
    "unittest without a case": (
        """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        for n in []:
            self.assertEqual(add(n, 1), n)
""",
        "no_assertion",
    ),
    "pytest without a case": (
        """
import pytest
@pytest.mark.parametrize('n', [])
def test_add(n):
    assert add(n, 1) == n
""",
        "no_assertion",
    ),
    "a test that skips itself": (
        """
import pytest
def test_add():
    made = add(1, 2)
    pytest.skip('later')
    assert made
""",
        "skipped",
    ),
    "a class that skips itself": (
        """
import unittest
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.skipTest('later') if add(1, 2) else 0
        self.assertTrue(add(1, 2))
""",
        "skipped",
    ),
    "skipif": (
        """
import pytest
@pytest.mark.skipif(True, reason='never')
def test_add():
    assert add(1, 2) == 3
""",
        "skipped",
    ),
    "a failure that the test catches": (
        """
def test_add():
    try:
        assert add(1, 2) == 4
    except AssertionError:
        print('failed')
""",
        "failed",
    ),
    "an expected exception that the test itself raises": (
        """
def test_none():
    try:
        add(1, 2)
        raise ValueError('nothing raised')
    except ValueError:
        pass
""",
        "failed",
    ),
    "an assert False that the test catches": (
        """
try:
    add(1, 2)
    assert False
except Exception:
    print('raised')
""",
        "failed",
    ),
    "a failure before an expected exception": (
        """
try:
    assert add(1, 2) == 4
    add(None, 2)
    assert False
except Exception:
    pass
""",
        "failed",
    ),
    "a failure in a thread": (
        """
import threading
def check():
    assert add(1, 2) == 4
thread = threading.Thread(target=check)
thread.start()
thread.join()
""",
        "failed",
    ),
    "a function of the program that is named like an assertion": (
        """
Holder().assert_true(add(1, 2))
""",
        "no_assertion",
    ),
    "a try that fails where it raises, and is not reached": (
        """
def test_table():
    for _ in []:
        try:
            table()["a"]
        except Exception as error:
            raise AssertionError("raised") from error
""",
        "no_assertion",
    ),
    "an error that the test catches": (
        """
try:
    assert add(None, 2) == 4
except Exception as error:
    print(error)
assert add(1, 2) == 3
""",
        "failed",
    ),
    "a StopIteration of the program": (
        "assert all(map(lambda n: stopped() == n, [1, 2]))",
        "error",
    ),
    "a failing tearDown": (
        """
import unittest
class TestAdd(unittest.TestCase):
    def tearDown(self):
        raise OSError
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
""",
        "error",
    ),
    "a failing setUpClass": (
        """
import unittest
class TestAdd(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise OSError
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
""",
        "error",
    ),
}
"""Form -> tests that the right program does not pass either, and the reason."""

REFUSED = {
    "a bare comparison": (
        "add(1, 2) == 3",
        "comparison that nothing reads; write assert",
    ),
    "a bare comparison in a list": (
        ["assert add(1, 2) == 3", "add(2, 2) == 4"],
        "test 2 of 2: add\\(2, 2\\) == 4",
    ),
    "a bare comparison in a test": (
        """
def test_a():
    add(1, 2) == 3
    assert add(2, 2) == 4
""",
        "test_a: .*write assert",
    ),
    "an assert of a tuple": (
        "assert (add(1, 2) == 3, 'wrong')",
        "tuple, which is always true",
    ),
    "no assertion": (
        """
add(1, 2)
print(add(1, 2) == 3)
""",
        "no assertion",
    ),
    "no assertion in all tests": (
        """
def test_a():
    add(1, 2)
def test_b():
    div(1, 2)
""",
        "test_a has no assertion",
    ),
    "a test that uses nothing of the program beside one that does": (
        """
def test_a():
    print(1)
def test_b():
    assert add(1, 2) == 3
""",
        "test_a has no assertion",
    ),
    "no assertion in a method": (
        """
import unittest
class TestAdd(unittest.TestCase):
    def test_a(self):
        return add(1, 2) == 3
""",
        "TestAdd.test_a has no assertion",
    ),
    "a constant": (
        """
add(1, 2)
assert True
""",
        "does not depend on the program",
    ),
    "a constant in check": (
        """
def check(candidate):
    candidate(1, 2)
    assert 1 == 1
""",
        "check: .*does not depend",
    ),
    "a constant in unittest": (
        """
import unittest
class TestAdd(unittest.TestCase):
    def test_a(self):
        add(1, 2)
        self.assertTrue(True)
""",
        "does not depend",
    ),
    "a variable of the tests": (
        """
x = 3
assert x == 3
""",
        "does not depend",
    ),
    "a module of Python": (
        """
import math
assert math.sqrt(4) == 2
""",
        "does not depend",
    ),
    "a built-in function": (
        ["assert sum([1, 2]) == 3"],
        "sum.* built-in",
    ),
    "the tests' own solution": (
        """
def add(a, b):
    c = a + b
    return c
def test_a():
    assert add(1, 2) == 3
""",
        "test_a: .*does not depend",
    ),
    "a function that nothing calls": (
        """
def verify():
    assert add(1, 2) == 3
""",
        "nothing calls verify.*name it test_verify",
    ),
    "assertions after return": (
        """
def test_a():
    return
    assert add(1, 2) == 3
""",
        "test_a has no assertion",
    ),
    "below if False": (
        """
if False:
    assert add(1, 2) == 3
""",
        "no assertion",
    ),
    "skipped alone": (
        """
import unittest
class TestAdd(unittest.TestCase):
    @unittest.skip('slow')
    def test_a(self):
        self.assertEqual(add(1, 2), 3)
""",
        "skipped",
    ),
    "a class that is skipped": (
        """
import pytest
@pytest.mark.xfail
class TestA:
    def test_a(self):
        assert add(1, 2) == 3
""",
        "skipped, or expected to fail",
    ),
    "a list of nothing": (
        ["import math", "x = 1"],
        "no assertion",
    ),
    "a list that is no Python": (
        ["assert add(1, 2) =="],
        "no Python",
    ),
    "pytest.warns": (
        """
import pytest
def test_a():
    with pytest.warns(UserWarning):
        add(1, 2)
""",
        "pytest.warns: the sandbox has no pytest",
    ),
    "a fixture of pytest": (
        """
def test_a(capsys):
    add(1, 2)
    assert capsys.readouterr().out == '3'
""",
        "parameter 'capsys'",
    ),
    "a fixture of a fixture": (
        """
import pytest
@pytest.fixture
def made(tmp_path):
    return tmp_path
def test_a(made):
    assert add(1, made)
""",
        "made has the parameter 'tmp_path'",
    ),
    "fixtures with params": (
        """
import pytest
@pytest.fixture(params=[1, 2])
def n(request):
    return request.param
def test_a(n):
    assert add(n, 1)
""",
        "fixture\\(params",
    ),
    "a plug-in of pytest": (
        """
import pytest_mock
def test_a():
    assert add(1, 2) == 3
""",
        "pytest_mock",
    ),
    "unittest.mock": (
        """
from unittest.mock import patch
def test_a():
    with patch("solution.add"):
        assert add(1, 2) == 3
""",
        "unittest.mock: .*another process",
    ),
    "unittest.mock of the package": (
        "from unittest import mock as m\n@m.patch('solution.add')\ndef test_a(add):\n    assert add(1, 2) == 3",
        "unittest.mock: .*another process",
    ),
    "unittest.mock by its attribute": (
        "import unittest.mock\ndef test_a():\n    assert add(1, unittest.mock.ANY) == 3",
        "unittest.mock: .*another process",
    ),
    "unittest.mock by its alias": (
        "import unittest.mock as m\ndef test_a():\n    assert add(1, m.ANY) == 3",
        "unittest.mock: .*another process",
    ),
    "all of unittest.mock": (
        "from unittest.mock import *\ndef test_a():\n    assert add(1, ANY) == 3",
        "unittest.mock: .*another process",
    ),
    "failures suppressed by an alias": (
        "from contextlib import suppress as s\nwith s(Exception):\n    assert add(1, 2) == 3",
        "suppress the failures",
    ),
    "failures dropped by return in finally": (
        """
def test_a():
    try:
        assert add(1, 2) == 3
    finally:
        return
""",
        "suppress the failures",
    ),
    "failures dropped by continue in finally": (
        """
for n in range(3):
    try:
        assert add(n, 2) == n + 2
    finally:
        if n:
            continue
""",
        "suppress the failures",
    ),
    "logs": (
        """
import unittest
class TestAdd(unittest.TestCase):
    def test_a(self):
        with self.assertLogs():
            add(1, 2)
""",
        "assertLogs: tests cannot see",
    ),
    "printed text": (
        """
import io, sys
sys.stdout = io.StringIO()
add(1, 2)
assert sys.stdout.getvalue() == '3'
""",
        "sys.stdout: tests cannot see",
    ),
    "an entry point that is no name": (
        ("def check(candidate):\n    assert candidate(1, 2) == 3", {"entry_point": "the function"}),
        "entry point 'the function' is no Python",
    ),
    "an assertion of the program's own": ("assert_true(add(1, 2) == 3)", "no assertion"),
    "a failure by a function of the program's own": ("if add(1, 2) != 3:\n    fail('wrong')", "no assertion"),
    "the program's names from another module": (
        "from roman import add\ndef test_a():\n    assert add(1, 2) == 3",
        "the module roman; .*import them from solution",
    ),
    "suppressed failures": (
        "import contextlib\nwith contextlib.suppress(Exception):\n    assert add(1, 2) == 3",
        "suppress the failures",
    ),
    "empty outputs": (
        {"inputs": ["1", "2"], "outputs": ["", "\n"]},
        "does nothing would pass",
    ),
}
"""Form -> tests that could prove nothing, or that cannot be run, and a part of the message."""


def request_of(form):
    tests, columns = form if isinstance(form, tuple) else (form, {})
    return read_tests(tests, columns)


@pytest.fixture(scope="module")
def verdicts():
    """Name of a form -> the reasons for the right and the wrong program, of all forms in one pool."""
    forms = {**FORMS, **{name: tests for name, (tests, _) in NOT_PASSED.items()}}
    read = {name: request_of(form) for name, form in forms.items()}
    pool = SandboxPool("auto", Limits(seconds=10.0, memory_mib=256), 2)
    jobs = [{"source": source, **each.request} for each in read.values() for source in (RIGHT, WRONG)]
    runs = iter(pool.run(jobs))
    judged = {name: tuple(judge(each, next(runs)) for _ in range(2)) for name, each in read.items()}
    pool.close()
    return judged


@pytest.mark.parametrize("form", FORMS)
def test_the_right_program_passes_and_the_wrong_one_does_not(verdicts, form):
    right, wrong = verdicts[form]
    assert right["code_reason"] == "passed", right
    assert right["code_passed"] == right["code_tests"]
    assert wrong["code_reason"] in ("failed", "error"), wrong
    assert wrong["code_passed"] < wrong["code_tests"]


def test_there_are_60_forms():
    assert len(FORMS) >= 60


@pytest.mark.parametrize("form", NOT_PASSED)
def test_what_executes_no_assertion_or_is_skipped_has_not_passed(verdicts, form):
    right, _ = verdicts[form]
    assert (right["code_reason"], right["code_passed"]) == (NOT_PASSED[form][1], 0), right


@pytest.mark.parametrize("form", REFUSED)
def test_tests_that_could_prove_nothing_are_refused_when_they_are_read(form):
    tests, message = REFUSED[form]
    with pytest.raises(DataError, match=message):
        request_of(tests if isinstance(tests, tuple) else (tests, ENTRY))


@pytest.mark.parametrize("data", ["1, -2, 'x', ", "[1, -2], ", "{1: (2, [])}, "])
def test_the_data_of_tests_is_not_looked_through(data, monkeypatch):
    body = ast.parse(f"assert add([{data * 1000}], 1) == {{}}").body
    assert len(walk(body[0])) < 10
    assertions, seen = Assertions(body, ["add"]), []
    is_assertion = Assertions.is_assertion
    monkeypatch.setattr(Assertions, "is_assertion", lambda self, *of: seen.append(of) or is_assertion(self, *of))
    compile_counted(f"assert add([{data * 1000}], 1) == {{}}", "test", assertions)
    assert len(seen) < 10
