"""A loop as PyTorch's word language model: no optimizer, the rate annealed on a plateau."""

import torch
from torch import nn

from tests.real_programs.data import text
from tests.real_programs.models import RNN

batch_size, bptt, clip = 8, 10, 0.25


def batchify(data):
    data = data.narrow(0, 0, data.size(0) // batch_size * batch_size)
    return data.view(batch_size, -1).t().contiguous()


def repackage_hidden(hidden):
    return tuple(state.detach() for state in hidden)


def get_batch(source, i):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


torch.manual_seed(1111)
tokens = text()
train_data, val_data = batchify(tokens[:1600]), batchify(tokens[1600:])
model = RNN()
criterion = nn.CrossEntropyLoss()


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, repackage_hidden(hidden))
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train():
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(batch_size)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
    return total_loss


log = []
lr = 2.0
best_val_loss = None
for _epoch in range(5):
    log.append(train())
    val_loss = evaluate(val_data)
    log.append(val_loss)
    if not best_val_loss or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        lr /= 4.0
