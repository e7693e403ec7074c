"""lora_text: train the transformer on public text, other packages' docstrings, and keep it. About half a minute.

python -m lora_text.pretrain
"""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from lora_text.data import PUBLIC, labelled
from lora_text.model import BASE, WIDTH, Encoder


def main(epochs=8, batch=64, rate=1e-3):
    torch.manual_seed(0)
    x, y = (torch.from_numpy(part) for part in labelled(PUBLIC, most=400))
    net = nn.Sequential(Encoder(), nn.Linear(WIDTH, len(PUBLIC)))
    optimiser = torch.optim.Adam(net.parameters(), rate)
    for epoch in range(1, epochs + 1):
        right = 0
        for rows in torch.randperm(len(y)).split(batch):
            logits = net(x[rows])
            optimiser.zero_grad()
            cross_entropy(logits, y[rows]).backward()
            optimiser.step()
            right += int((logits.argmax(1) == y[rows]).sum())
        print(f"epoch {epoch} of {epochs}: {right / len(y):.1%} of {len(y)} public sentences right")
    save_file(net[0].state_dict(), BASE)
    print(f"The base is in {BASE}")


if __name__ == "__main__":
    main()
