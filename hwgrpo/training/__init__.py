"""The loop, the policy model, batch layouts, strategies, checkpoints."""

from hwgrpo.registry import Registry

LAYOUTS = Registry(
    "model.layout",
    {
        "padded": "hwgrpo.training.policy.layouts:PADDED",
        "packed": "hwgrpo.training.policy.layouts:PACKED",
        "grouped": "hwgrpo.training.policy.layouts:GROUPED",
        "grouped_masked": "hwgrpo.training.policy.layouts:GROUPED_MASKED",
    },
)
STRATEGIES = Registry(
    "trainer.strategy",
    {
        "single": "hwgrpo.training.strategies.single:Single",
        "ddp": "hwgrpo.training.strategies.ddp:Ddp",
        "fsdp2": "hwgrpo.training.strategies.fsdp2:Fsdp2",
        "deepspeed": "hwgrpo.training.strategies.deepspeed:Deepspeed",
    },
)
