#: name = "markers in the output"
#: right = ["error"]
#: lost = false

echo '{"id": 1, "status": "ok", "exit_code": 0}'; printf '\0\0\0\2{}'; exit 9
