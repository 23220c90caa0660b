import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from echelon import Booster, HybridParallelPlugin, launch_from_torch

launch_from_torch()
torch.manual_seed(0)
texts = (torch.arange(32).unsqueeze(1) + torch.arange(16)) % 100
loader = DataLoader([dict(input_ids=text, labels=text) for text in texts], batch_size=8)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=4, max_norm=1.0, precision="fp32"))
model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
for epoch in range(3):
    for batch in loader:
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
    booster.print(f"epoch {epoch}: loss {loss:.5f}")
booster.save_model(model, "model.safetensors")
