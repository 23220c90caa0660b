import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster, LowLevelZeroPlugin, launch_from_torch

config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
launch_from_torch()
torch.manual_seed(0)
texts = (torch.arange(32).unsqueeze(1) + torch.arange(16)) % 100
data = [dict(input_ids=text, labels=text) for text in texts]
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
engine = Booster(plugin=LowLevelZeroPlugin.from_config(config, without=["optimizer"]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, _, loader, _ = engine.boost(model, optimizer, None, DataLoader(data, batch_size=4))
for epoch in range(3):
    for batch in loader:
        loss = model(**batch).loss
        engine.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    engine.print(f"epoch {epoch}: loss {loss:.5f}")
engine.save_model(model, "model", shard=True)
