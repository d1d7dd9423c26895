"""The part of a model card on its use: a template of code for each task of the hub."""

USE = """\
## Use
```python
{% if task == "text-classification" %}
from transformers import pipeline

classify = pipeline("text-classification", model={{ place | tojson }})
print(classify("A text", truncation=True\
{{ "" if model.labels else ', function_to_apply="none"' }}\
{{ ", top_k=None" if model.per_text == "any" else "" }}))
```
or `lmwright predict {{ word(place) }} texts.csv`.
{% elif task == "token-classification" %}
from transformers import pipeline

tag = pipeline("token-classification", model={{ place | tojson }}, aggregation_strategy="first")
print(tag("A text"))
```
{% elif task == "question-answering" %}
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ place | tojson }})
model = AutoModelForQuestionAnswering.from_pretrained({{ place | tojson }})
inputs = tokenizer("Who slept?", "Ada slept.", return_tensors="pt", return_token_type_ids=False)
out = model(**inputs)  # start_logits and end_logits of each token
```
or `lmwright predict {{ word(place) }} questions.jsonl`.
{% elif task == "feature-extraction" %}
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ place | tojson }})
model = AutoModel.from_pretrained({{ place | tojson }})
states = model(**tokenizer("A text", return_tensors="pt")).last_hidden_state
```
An encoder to be fine-tuned, by any class of its family. `mask_predictions` in its weights is its \
head for replaced tokens, for which transformers has no class.
{% elif task == "sentence-similarity" %}
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({{ place | tojson }})
print(model.similarity(*model.encode(["A text", "Another one"])))
```
or `lmwright embed {{ word(place) }} texts.csv --out vectors.npz`.
{% elif model.fills_masks %}
{% set masked_class = "AutoModelForCausalLM" if model.bias == "qkv" else "AutoModelForMaskedLM" %}
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from transformers import {{ masked_class }}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ place | tojson }})
model = {{ masked_class }}.from_pretrained({{ place | tojson }})
pipeline = LLaDA2Pipeline(model, BlockRefinementScheduler(), tokenizer)
out = pipeline("Once upon a time", use_chat_template=False, gen_length=64, block_length=32,
               temperature=0.0, threshold=2.0, editing_threshold=None)
print(out.texts[0])
```
or `lmwright generate {{ word(place) }} --prompt "Once upon a time"`. A masked diffusion model: it \
looks both ways and fills in masks, so that it needs transformers 5.3 or later\
{{ ": earlier ones, which do not read is_causal, compute a causal model without a word" \
if model.bias == "qkv" else "" }}.
{% if model.predicts == "next" %}
Its output at a place predicts the next token, which diffusers does not know: sample with lmwright.
{% endif %}
{% elif task == "fill-mask" and "positions" in model.spec() %}
from lmwright.formats.load import load_model

loaded = load_model({{ place | tojson }})  # loaded.model, loaded.weights, loaded.tokenizer
```
A generator with an enhanced mask decoder, whose last layer runs twice with queries that know \
their positions. transformers has no class for that: what it opens here is another model.
{% elif task == "fill-mask" %}
from transformers import pipeline

fill = pipeline("fill-mask", model={{ place | tojson }})
print(fill(f"Once upon a {fill.tokenizer.mask_token}"))
```
{% else %}
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ place | tojson }})
model = AutoModelForCausalLM.from_pretrained({{ place | tojson }})
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
or `lmwright generate {{ word(place) }} --prompt "Once upon a time"`.
{% endif %}
"""
