"""One layer of qknorm.MultiheadAttention learns to say a key's value, given key-value pairs and the key."""

import torch
from torch import nn

from qknorm import MultiheadAttention

SYMBOLS, PAIRS, WIDTH = 64, 12, 64


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS, WIDTH)
        self.attention = MultiheadAttention(WIDTH, 4, batch_first=True, length=PAIRS)
        self.answer = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, keys, values, question):
        found, _ = self.attention(self.keys(question), self.keys(keys), self.values(values), need_weights=False)
        return self.answer(found.squeeze(1))


torch.manual_seed(0)
model = Recall()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1, 201):
    keys = torch.rand(128, SYMBOLS).argsort(dim=1)[:, :PAIRS]
    values, asked = torch.randint(SYMBOLS, (128, PAIRS)), torch.randint(PAIRS, (128, 1))
    answers = values.gather(1, asked).squeeze(1)
    predicted = model(keys, values, keys.gather(1, asked))
    loss = nn.functional.cross_entropy(predicted, answers)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        right = (predicted.argmax(1) == answers).float().mean()
        g = model.attention.norm.scale.item()
        print(f"step {step:3}  loss {loss.item():6.3f}  right {right:4.0%} {'█' * int(30 * right):30}  g {g:.2f}")
