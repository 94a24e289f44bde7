"""The training loop, its set-up, and the floors below it.

loop.py              runs the stages of each step
interrupt.py         Ctrl-C, SIGTERM, SIGHUP
step_stages.py       the stages of a step, in their order; stages/ has them
setup.py             the parts of a run, from its settings
shared_setup.py      the parts that training and evaluation share; the copy of the policy that samples
reward_setup.py      the reward functions, checked against data and estimator
run_parts.py         the parts, as the loop finds them
text_notes.py        notes on the text that rewards and stop strings see
run_record.py        the records that a run makes of itself: settings, machine, kernels
end_of_turn.py       whether a response ends where the chat template ends a message
model_setup.py       the models of a run, on their devices
module_fusion.py     fused modules of a run
fusion_check.py      what a model computes with fused modules, against what it computes without
startup_checks.py    what is checked before a model is loaded
vision_checks.py     which settings a vision-language model takes
sequence_checks.py   whether ranks may share a model's sequences
run_folder.py        the folder of a run
captured_files.py    the files of a captured step; captured_step.py writes and reads them
code_files.py        Python files of the user's that a run calls
resume.py            going on from a checkpoint
resume_check.py      a resumed run's log-probs against those of the machine that saved the checkpoint
rollout_guard.py     measures against a gap between rollout engine and trainer
moving_reference.py  a reference model that follows the policy
online_rewards.py    reward models that are trained during the run
out_of_memory.py     what to say when memory is full
evaluate.py          measuring a policy on held-out prompts
finish.py            the final model and the summary
supervised/          the steps of `hwgrpo sft`
feed/                prompts and responses of each step
update/              the optimizer updates
checkpoint/          saving and restoring
strategies/          one policy on one or many processes
policy/              the module that strategies wrap, and its micro-batches
"""
