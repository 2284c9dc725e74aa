#: name = "a patched server"
#: right = ["protocol", "error"]
#: lost = true
#: uses = ["frames"]

here = sys._getframe(1)
here.f_globals['write_frame'] = lambda *a, **k: None
here.f_globals['os'] = here.f_globals['read_frame'] = None
