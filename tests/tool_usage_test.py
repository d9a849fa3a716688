"""The tool from a shell's point of view: the command line itself: help, wrong options, files that cannot be read or written, env."""

import os
import resource
import shutil
import subprocess

from tool_testing import BENCH, ToolTest, main, run, tool


class Usage(ToolTest):
    def test_help_everywhere(self):
        for command in ("env", "gen", "decode", "check", "plan", "convert", "info", "bench", "dcp"):
            text = self.succeed(command, "--help")
            self.assertIn("Example", text, command)
            self.assertIn("--help", text, command)
        self.assertIn("Exit status", self.succeed("--help"))

    def test_version(self):
        self.assertRegex(self.succeed("--version"), r"^sparsemla \d+\.\d+\.\d+\n$")

    def test_usage_errors(self):
        self.refuse(mentions=["command", "decode"])
        self.refuse("dekode", mentions=["dekode", "decode"])
        self.refuse("decode", mentions=["CASE"])
        self.refuse("decode", self.case, "--bogus", mentions=["--bogus"])
        self.refuse("decode", self.case, "another", mentions=["another"])
        self.refuse("bench", "--json", "--csv")

    def test_numbers(self):
        self.refuse("plan", "--record", "fp8", "--heads=", mentions=["--heads", "value"])
        self.refuse("plan", "--record", "fp8", "--heads", 4, "--heads", 5, mentions=["--heads", "once"])
        for value in ("0", "129", "-1", "abc", "1e3", "0x10", "99999999999999999999", "8.5"):
            for command in (["gen", self.path("never"), "--width", "4"], ["plan"]):
                self.refuse(*command, "--record", "fp8", f"--heads={value}", mentions=["--heads", value, 1, 128])
            self.assertFalse(os.path.exists(self.path("never")))
        for option in ("--threads", "--splits", "--chunk"):
            self.refuse("decode", self.case, option, "0", mentions=[option])
        self.refuse("gen", self.path("never"), "--record", "fp8", "--absent", "nan", mentions=["--absent", "nan"])

    def test_huge_numbers(self):
        largest = 2**31 - 1
        for options in (["--rows", largest, "--width", largest], ["--width", largest, "--page-size", largest],
                        ["--pages", largest, "--page-size", largest], ["--page-stride-bytes", 2**40]):
            self.refuse("gen", self.path("never"), "--record", "fp8", *options)
            self.assertFalse(os.path.exists(self.path("never")), options)

    def test_names(self):
        self.refuse("decode", self.case, "--kernel", "warp", mentions=["--kernel", "warp", "cpu", "reference"])
        self.refuse("check", self.case, "--kernel", "warp", mentions=["--kernel", "warp", "all"])
        self.refuse("decode", self.case, "--p-format", "f8", mentions=["--p-format", "f8", "e4m3"])
        self.refuse("plan", "--record", "fp9", mentions=["--record", "fp9", "nvfp4_ds_mla"])
        self.refuse("bench", "--suite", "none", mentions=["--suite", "none", "speed"])
        self.refuse("bench", "--filter", "no such problem", mentions=["--filter"])

    def test_tiling(self):
        """Words are checked by the parser, and what only GPU kernels have is refused by the CPU's by name."""
        for option, wrong, right in (("--tile-heads", "17", "32"), ("--stages", "0", "2"),
                                     ("--cluster-tiles", "x", "2"), ("--gather", "scatter", "bulk"), ("--transport", "copy", "bulk"),
                                     ("--trigger", "never", "end")):
            for command in (["plan", self.case], ["decode", self.case], ["check", self.case], ["bench"]):
                self.refuse(*command, option, wrong, mentions=[option, wrong])
            field = option[2:].replace("-", "_")
            for command in (["plan", self.case], ["decode", self.case]):
                self.refuse(*command, "--device", "cpu", option, right, mentions=[field, "must not be given"])
            result = run("check", self.case, "--device", "cpu", option, right)
            self.assertEqual(result.returncode, 2)
            self.assertIn(field + " must not be given", result.stderr)
            self.assertIn(option, self.succeed("plan", "--help"))

    def test_devices(self):
        for device in ("gpu", "cuda", "cuda:", "cuda:-1", "cuda:x", "cpu:0", ""):
            self.refuse("decode", self.case, "--device", device, mentions=["--device", "cuda:N"])
        self.refuse("decode", self.case, "--device", "cuda:99", mentions=["cuda:99"])
        self.refuse("check", self.case, "--device", "cuda:99", mentions=["cuda:99"])


class Files(ToolTest):
    def test_unreadable(self):
        truncated = self.path("truncated")
        with open(self.case, "rb") as source, open(truncated, "wb") as target:
            target.write(source.read()[:-100])
        empty = self.path("empty")
        open(empty, "w").close()
        text = self.path("text")
        with open(text, "w") as target:
            target.write("this is no safetensors file\n" * 10)
        for path in (truncated, empty, text, self.directory, self.path("missing"), "/dev/null", ""):
            for command in ("decode", "check", "info", "convert", "plan"):
                if (command, path) == ("plan", ""):
                    continue
                if command != "check":
                    self.refuse(command, path)
                    continue
                result = run(command, path)
                self.assertEqual(result.returncode, 2, f"{command} {path}")
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)

    def test_names_from_files_do_not_steer_the_terminal(self):
        def rename(header, _):
            header["\x1b[31mred\nline"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}

        result = run("info", self.corrupted("escape", rename))
        self.assertNotIn("\x1b", result.stdout + result.stderr)

    def test_unwritable_output(self):
        for output in (self.directory, self.path("missing/out"), self.case + "/out", "/dev/full", ""):
            self.refuse("decode", self.case, f"--output={output}")
            self.refuse("gen", output, "--record", "fp8", "--width", 4)
        self.assertTrue(os.path.exists("/dev/full"))
        self.refuse("bench", "--plot", self.path("missing/plot.svg"), mentions=["missing/plot.svg"])

    def test_full_disk_leaves_no_file(self):
        before = sorted(os.listdir(self.directory))
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        self.refuse("decode", self.case, "-o", self.path("large"), preexec_fn=limit, mentions=["large"])
        self.refuse("gen", self.path("large"), "--record", "fp8", "--width", 4, preexec_fn=limit, mentions=["large"])
        self.refuse(*BENCH, "--suite", "speed", "--plot", self.path("large"), mentions=["large"],
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)))
        self.assertEqual(sorted(os.listdir(self.directory)), before)

    def test_failed_write_keeps_the_old_file(self):
        kept = self.path("kept")
        shutil.copy(self.case, kept)
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        self.refuse("gen", kept, "--record", "fp8", "--width", 4, preexec_fn=limit)
        with open(kept, "rb") as now, open(self.case, "rb") as old:
            self.assertEqual(now.read(), old.read())

    def test_full_stdout(self):
        with open("/dev/full", "w") as full:
            for arguments in (["env"], ["--help"], ["--version"], ["check", self.case], ["decode", self.case, "--json"]):
                result = subprocess.run([tool(), *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
                self.assertEqual(result.returncode, 2, arguments)
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
                self.assertIn("standard output", result.stderr)

    def test_closed_stdout(self):
        result = subprocess.run(["sh", "-c", f'"{tool()}" info "{self.case}" >&-'], capture_output=True, text=True)
        self.assertEqual(result.returncode, 2)
        self.assertIn("standard output", result.stderr)

    def test_broken_pipe_is_quiet(self):
        result = subprocess.run(["bash", "-c", f'"{tool()}" info "{self.case}" --slots 0-60 --dump | head -n 1'],
                                capture_output=True, text=True)
        self.assertEqual(result.returncode, 0)
        self.assertEqual(result.stderr, "")


class Env(ToolTest):
    def test_devices_list_their_own_kernels(self):
        for device in self.succeed_json("env")["devices"]:
            for kernel in device["kernels"]:
                self.assertNotIn("runs on device", kernel["reason"], device["device"])

    def test_text(self):
        text = self.succeed("env")
        for word in ("version", "compiler", "CPU features", "kernel cpu", "kernel reference", "usable"):
            self.assertIn(word, text)

    def test_json(self):
        document = self.succeed_json("env")
        self.assertEqual(list(document), ["version", "compiler", "cuda", "cpu", "kernels", "devices"])
        cpu = document["devices"][0]
        self.assertEqual(cpu["device"], "cpu")
        self.assertTrue(cpu["usable"])
        self.assertGreaterEqual(cpu["threads"], 1)
        self.assertEqual({kernel["name"]: kernel["usable"] for kernel in cpu["kernels"]}["cpu"], True)


if __name__ == "__main__":
    main()
