"""What every part needs and no part owns: files, processes, texts, waits. It imports nothing of the core but `errors`.

child_processes.py       the hash seed that child processes share, and their end, in any process group or session
closing.py               close several things, each whatever the others do
event_loops.py           an event loop for a coroutine, also where one runs already
file_systems.py          locks, durable writes and copies, also where Lustre, NFS, CIFS or FUSE refuse them
free_cores.py            torch's number of threads, set by the cores that other programs leave free
framed_messages.py       messages in a pipe: the length in 8 bytes, then the body
given_objects.py         Python objects that settings name: `object://NAME`
http_exchange.py         one HTTP request with limits on time and size, and an exception per kind of failure
jsonlines.py             files of JSON lines that survive a kill
launched_ranks.py        ranks that a launcher such as torchrun has started
paths.py                 files and folders in settings: whether they exist, and the nearest existing ones
permissions.py           permissions of files and folders
pretrained_tokenizer.py  a tokenizer as its `tokenizer.json` defines it
run_files.py             files of a run's folder, which a stranger may have made
scratch.py               folders that end with the process that made them
stage_differences.py     error and tolerance of the stages of a computation that was made twice
template_clock.py        the date that chat templates with a clock write: one for all prompts of a run
template_limit.py        a time limit for chat templates
terminal_width.py        text folded into the columns of a terminal
text.py                  text as it may be shown: without secrets, and with nothing that steers a terminal
torch_settings.py        torch's settings of a process, kept while a function of the user's own runs in it
waits.py                 waits with a time limit, which print their progress
"""
