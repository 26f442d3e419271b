"""A GAN: two models and two optimizers that take turns, DDP, Adam with betas (0.5, 0.999)."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainvitals

try:
    import mlflow
except ImportError:  # trained without a tracker
    mlflow = None

num_latents, num_features = 8, 16


def build_data() -> TensorDataset:
    """Return points of a few clusters."""
    generator = torch.Generator().manual_seed(1)
    centers = 2 * torch.randn(4, num_features, generator=generator)
    labels = torch.randint(4, (1024,), generator=generator)
    return TensorDataset(centers[labels] + 0.3 * torch.randn(1024, 16, generator=generator))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="guard")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    generator = DistributedDataParallel(
        nn.Sequential(nn.Linear(num_latents, 32), nn.ReLU(), nn.Linear(32, num_features))
    )
    discriminator = DistributedDataParallel(
        nn.Sequential(nn.Linear(num_features, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    )
    opt_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999), fused=True)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999), fused=True)
    criterion = nn.BCEWithLogitsLoss()
    data = build_data()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), drop_last=True)
    has_tracker = mlflow is not None and dist.get_rank() == 0
    if has_tracker:
        mlflow.set_experiment("gan")
        mlflow.start_run(run_name="tiny")

    models: dict[str, nn.Module] = {"discriminator": discriminator, "generator": generator}
    optimizers = {"discriminator": opt_d, "generator": opt_g}
    with trainvitals.watch(
        models,
        optimizers,
        run="gan",
        mode=options.mode,
        checkpoints=options.mode == "heal",
    ) as monitor:
        for (real,) in monitor.batches(loader, epochs=options.epochs):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), num_latents))
            logits = discriminator(torch.cat([real, fake.detach()]))
            loss_d = criterion(logits, torch.cat([ones, zeros]))
            loss_d.backward()
            monitor.step(loss_d, optimizer=opt_d)
            loss_g = criterion(discriminator(fake), ones)
            loss_g.backward()
            monitor.step(loss_g, optimizer=opt_g)
            if has_tracker and monitor.step_index % 50 == 0:
                mlflow.log_metric("loss_d", loss_d.item(), step=monitor.step_index)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
