"""A watched linear layer with faults at chosen steps."""

import torch

from trainer_hooks import watch


def trained(mode, *, nan=(), nan_parameters=(), spikes=(), steps=140):
    """Train a linear layer, with faults at these steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with watch(model, optimizer, run="tiny", mode=mode, checkpoints=mode == "heal") as monitor:
        for step in range(steps):
            x = torch.randn(32, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() + 1.0
            if step in nan_parameters:
                model.weight.data.fill_(float("nan"))
            if step in nan:
                loss = loss * float("nan")
            if step in spikes:
                loss = loss * 1e4
            loss.backward()
            monitor.step(loss, max_norm=1.0)
