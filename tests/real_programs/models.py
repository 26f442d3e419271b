"""The programs' models: small, with the parts that matter to a guard."""

import torch
from torch import nn

from tests.real_programs.data import WORDS


class GPT(nn.Module):
    """A causal transformer of one block, with dropout and tied weights."""

    def __init__(self, length=12, width=24, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens, targets):
        """Return the logits and the mean loss."""
        hidden = self.tokens(tokens) + self.places.weight
        logits = self.head(self.block(hidden, src_mask=self.mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RNN(nn.Module):
    """An LSTM that is handed its hidden state."""

    def __init__(self, width=24):
        super().__init__()
        self.width = width
        self.dropout = nn.Dropout(0.1)
        self.encoder = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width)
        self.decoder = nn.Linear(width, WORDS)

    def init_hidden(self, batch_size):
        """Return a state of zeros."""
        return (torch.zeros(1, batch_size, self.width), torch.zeros(1, batch_size, self.width))

    def forward(self, tokens, hidden):
        """Return the logits and the next hidden state."""
        output, hidden = self.lstm(self.dropout(self.encoder(tokens)), hidden)
        return self.decoder(self.dropout(output)).view(-1, WORDS), hidden


def convnet():
    """Return a network with batch norm, as image classifiers have."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class Detector(nn.Module):
    """Takes lists of images and targets, and returns its losses by name while it trains."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.boxes = nn.Linear(8, 4)
        self.labels = nn.Linear(8, 2)

    def forward(self, images, targets=None):
        """Return the losses, or boxes and logits of labels where nothing is to be learnt."""
        found = torch.cat([self.body(image[None]).flatten(1) for image in images])
        boxes, logits = self.boxes(found), self.labels(found)
        if targets is None:
            return boxes, logits
        return {
            "loss_classifier": nn.functional.cross_entropy(
                logits, torch.cat([t["labels"] for t in targets])
            ),
            "loss_box_reg": nn.functional.l1_loss(boxes, torch.cat([t["boxes"] for t in targets])),
        }


class LowRank(nn.Module):
    """A frozen linear layer and what is learnt beside it."""

    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x):
        """Return the sum of both."""
        return self.inner(x) + x @ self.lora_a.T @ self.lora_b.T


class Agent(nn.Module):
    """An actor and a critic that share nothing."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_value(self, x):
        """Return the critic's word."""
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        """Return an action, its log-probability, the entropy, and the critic's word."""
        chances = torch.distributions.Categorical(logits=self.actor(x))
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)
