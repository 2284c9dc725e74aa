#: name = "the working folder removed"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker", "runsc"]

rm -rf /tmp/* "$PWD" 2>/dev/null; mkdir -p "$PWD" 2>/dev/null; true
