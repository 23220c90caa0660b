import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
deepspeed.init_distributed()
torch.manual_seed(0)
texts = (torch.arange(32).unsqueeze(1) + torch.arange(16)) % 100
data = [dict(input_ids=text, labels=text) for text in texts]
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
engine, _, loader, _ = deepspeed.initialize(model=model, training_data=data, config=config)
for epoch in range(3):
    for batch in loader:
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"epoch {epoch}: loss {loss:.5f}")
engine.save_checkpoint("checkpoints")
