#: name = "patched json"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

import builtins
json.dumps = lambda *a, **k: '[]'
builtins.len = None
