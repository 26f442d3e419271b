"""What a followed run decides."""

from trainvitals.records import (
    Decision,
)

SKIP = Decision(
    ledger_seq=1,
    action="skip_step",
    step=7,
    decided_at_step=8,
    attempt=1,
    reason="loss is nan on rank 1",
    rule="nonfinite",
    cause="nonfinite_loss",
)
