"""Chat templates with the structure of those of well-known model families."""

from __future__ import annotations

# Tools and calls as in Llama 3.1: one call at a time, ``'tool_calls' in message``.
LLAMA3 = """
{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|head|>system\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n' }}{%- endfor %}
{%- endif %}
{{- system_message + '<|eot|>' }}
{%- for message in messages %}
    {%- if not (message.role in ['ipython', 'tool'] or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('One call at a time.') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot|>' }}
    {%- else %}
        {{- '<|head|>ipython\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant\n' }}{%- endif %}
"""

# Calls as in Mistral 7B v0.3: the function is printed as a whole.
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools is not none and tools %}
            {{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id is not defined %}
                {{- raise_exception('A call needs an id.') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role in ['tool', 'tool_results'] %}
        {{- '[RESULT]{"content": ' + message.content | string + '}[/RESULT]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYS]' + message.content + '[/SYS]' }}
    {%- else %}
        {{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

# As in Mistral Small 3: content in parts for users, strings for assistants.
MISTRAL_PARTS = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}{%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}
        {%- if message['content'] is string %}
            {{- '[SYS]' + message['content'] + '[/SYS]' }}
        {%- else %}
            {{- '[SYS]' + message['content'][0]['text'] + '[/SYS]' }}
        {%- endif %}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Calls as in DeepSeek-V3: a test for null content, arguments concatenated as text.
DEEPSEEK = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<|User|>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- set ns.is_tool = false %}
        {%- for tool in message['tool_calls'] %}
            {%- if loop.first %}
                {%- if message['content'] == none %}
                    {{- '<|Assistant|><calls><call>' + tool['type'] + '<sep>' }}
                {%- else %}
                    {{- '<|Assistant|>' + message['content'] + '<calls><call>' }}
                    {{- tool['type'] + '<sep>' }}
                {%- endif %}
            {%- else %}
                {{- '\n<call>' + tool['type'] + '<sep>' }}
            {%- endif %}
            {{- tool['function']['name'] + '\n```json\n' }}
            {{- tool['function']['arguments'] + '\n```' }}
        {%- endfor %}
        {{- '</calls><|eos|>' }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' not in message %}
        {%- if ns.is_tool %}
            {{- '</outputs>' + message['content'] + '<|eos|>' }}
            {%- set ns.is_tool = false %}
        {%- else %}
            {%- set content = message['content'] %}
            {%- if '</think>' in content %}
                {%- set content = content.split('</think>')[-1] %}
            {%- endif %}
            {{- '<|Assistant|>' + content + '<|eos|>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- '\n' if ns.is_tool else '<outputs>' }}
        {{- '<output>' + message['content'] + '</output>' }}
        {%- set ns.is_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<|Assistant|>' }}{%- endif %}
"""

# As in the first templates of DeepSeek-R1: calls are printed only where content is null.
DEEPSEEK_R1 = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] in ['system', 'user', 'tool'] %}
        {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] == none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['function']['name'] + ' ' + tool['function']['arguments'] }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {{- '<|assistant|>' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# As in Qwen3: reasoning, calls with or without ``function``, arguments of either type.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if reasoning_content %}
            {{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>' + content + '</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# As in Qwen3-Coder and GLM-4.5: arguments are iterated.
ITEMS = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- '<call>' + call.name }}
        {%- for name, value in call.arguments | items %}
            {{- '<' + name + '>' }}{{ value if value is string else value | tojson }}
        {%- endfor %}
        {%- set _arguments = call.arguments %}
        {%- for name in _arguments.keys() %}{{- '|' + name }}{%- endfor %}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# As in Gemma 3: no system role of its own, strings or parts, alternating roles.
GEMMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set first = messages[0]['content'] + '\n\n' %}
    {%- else %}
        {%- set first = messages[0]['content'][0]['text'] + '\n\n' %}
    {%- endif %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set first = '' %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {{- '<turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- first if loop.first }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}
            {%- if item['type'] == 'image' %}
                {{- '<image>' }}
            {%- elif item['type'] == 'text' %}
                {{- item['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- else %}
        {{- raise_exception('Invalid content type') }}
    {%- endif %}
    {{- '</turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\n' }}{%- endif %}
"""

# As the tool_use template of Hermes: the calls of a message, each a mapping or in ``function``.
HERMES = """
{{- bos_token }}
{%- macro described(tool) %}{{ tool.name }}: {{ tool.parameters | tojson }}{% endmacro %}
{{- '<|im_start|>system\n' }}
{%- for tool in tools or [] %}{{- described(tool.function) }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role in ['user', 'system']
           or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# As in LLaVA: parts only, never tested for strings; assistants' parts are filtered.
LLAVA = """
{%- for message in messages %}
    {{- message['role'] | upper + ': ' }}
    {%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}
        {{- '<image>' }}
    {%- endfor %}
    {%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}
        {{- part['text'] + ' ' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}
"""

# As in SmolVLM and Llama Guard: the first part is looked at.
FIRST_PART = """
{%- for message in messages %}
    {{- message.role + (':' if message.content[0].type == 'image' else ': ') }}
    {{- message.content[0].text + '\n' }}
{%- endfor %}
"""

# As in Llama 4: strings are tested for in the system message alone.
HALF_GUARDED = """
{%- if messages[0].role == 'system' %}
    {%- if messages[0].content is string %}
        {{- messages[0].content + '\n' }}
    {%- else %}
        {{- messages[0].content[0]['text'] + '\n' }}
    {%- endif %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- for part in message.content %}{{- part.text }}{%- endfor %}
{%- endfor %}
"""

# As in Qwen3-VL: a macro writes the content.
MACRO = """
{%- macro write(content, is_system) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable %}
        {%- for item in content %}
            {%- if 'text' in item %}{{- item.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- set content = write(message.content, message.role == 'system') | trim %}
    {{- '<|' + message.role + '|>' + content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# As in gpt-oss: reasoning is called thinking; arguments are printed with tojson.
THINKING = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking %}{{- '<|analysis|>' + message.thinking }}{%- endif %}
        {%- if 'tool_calls' in message %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|call|>' + call.name + ' ' + call.arguments | tojson }}
        {%- endif %}
        {{- '<|final|>' + message.content }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
"""

# As in Llama 3.2 with images: parts are searched for images before the content is tested.
IMAGES_FIRST = """
{%- set ns = namespace(images=false) %}
{%- for message in messages %}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'image' %}{%- set ns.images = true %}{%- endif %}
    {%- endfor %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'tool' %}
        {{- message.content | tojson }}
    {%- elif message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- tool_call.function.arguments | tojson }}
    {%- endfor %}
{%- endfor %}
"""
