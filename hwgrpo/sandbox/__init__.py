"""Execution of programs that a model wrote, in processes that cannot reach the host, and the reward `code`.

code_reward.py       the reward `code`: scores of programs by unit tests
python_tool.py       the tool `python`: programs that a policy calls
unit_tests.py        programs in responses, tests in data rows, comparison of outputs
fenced_blocks.py     fenced blocks of code in a response
tests_in_source.py   the tests in source, and the reasons for which they could prove nothing
assertions.py        the assertions in source that depend on the program
sandbox_pool.py      the trainer's pool of workers: distribution of programs, deadlines, restarts
protection.py        the protection levels, and what a host lacks for one
limits.py            limits on one run of a program
sandbox_worker.py    the main function of a worker: a process that forks one child per program
program_run.py       one run: its processes, its deadline, its output
program_process.py   the process of the program
tests_process.py     the process of asserts, which calls the program's functions in the other process
called_tests.py      tests that are functions and methods, called as unittest and pytest call them
counted_assertions.py  compilation of tests so that assertions are counted
pytest_stand_in.py   the module `pytest` of that process
plain_values.py      the values that the two processes exchange
scratch_files.py     size and removal of the files that a program left
confinement.py       what a child gives up before it runs a program: user, capabilities, resources
namespaces.py        Linux namespaces, with a view of the few files that Python reads
landlock.py          Landlock: file access below a few folders only
seccomp_filter.py    seccomp: the system calls that a program may make
linux_calls.py       system calls that Python has no function for
"""
