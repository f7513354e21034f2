"""Trains a small network under NVFP4 with Lightning, and resumes it to the byte.

    pip install pytorch-lightning          # or lightning: `import lightning.pytorch as pl`
    python examples/train_lightning.py

Lightning calls training_step and never the module's forward. Each step still has random bits of its
own, because layers count their forwards themselves.
"""

import tempfile

import minifloat as mf
import pytorch_lightning as pl
import torch
from minifloat.lightning import TrainingStateCallback
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCHES = 2, 20


class Reverser(pl.LightningModule):
    """A network that learns to reverse vectors."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.losses = []
        mf.quantize_(self, "nvfp4")

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder, resume=None):
    pl.seed_everything(0, verbose=False)
    module = Reverser()
    x = torch.randn(BATCHES * 32, 32)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="auto",
        devices=1,
        max_epochs=EPOCHS,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        callbacks=[
            TrainingStateCallback(),
            ModelCheckpoint(folder, "{epoch}", save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.flip(1)), batch_size=32), ckpt_path=resume)
    return module


def main():
    with tempfile.TemporaryDirectory() as folder:
        module = train(folder)
        print(f"loss: {module.losses[0]:.3f} -> {module.losses[-1]:.3f}")
        print("forwards with bits of their own:", mf.training_state(module)["rng"][1].item())

        resumed = train(folder, resume=f"{folder}/epoch=0.ckpt")
        pairs = zip(module.parameters(), resumed.parameters(), strict=True)
        print("resumed weights equal:", all(torch.equal(a, b) for a, b in pairs))


if __name__ == "__main__":
    main()
