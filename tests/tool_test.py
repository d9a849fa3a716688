"""End-to-end runs of the command-line tool: every subcommand, exit statuses, JSON, hostile input.

Usage: tool_test.py path/to/sparsemla [unittest options]
"""

import csv
import io
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

TOOL = ""


def run(*arguments, **options):
    """The finished process, with its output as text. A hang is a failure."""
    return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def write_safetensors(path, header, payload):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + payload)


class ToolTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.mkdtemp(prefix="sparsemla-tool-")
        cls.case = os.path.join(cls.directory, "small.safetensors")
        result = run("gen", cls.case, "--record", "fp8", "--rows", 3, "--heads", 4, "--width", 70, "--counts", "70,0,9")
        assert result.returncode == 0, result.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.directory)

    def path(self, name):
        return os.path.join(self.directory, name)

    def succeed(self, *arguments, **options):
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 0, f"{arguments}: {result.stdout}{result.stderr}")
        self.assertEqual(result.stderr, "", arguments)
        return result.stdout

    def succeed_json(self, *arguments):
        return json.loads(self.succeed(*arguments, "--json"))

    def refuse(self, *arguments, mentions=(), **options):
        """Status 2, nothing on stdout, one line on stderr that names what is wrong."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 2, f"{arguments}: {result.stdout}{result.stderr}")
        self.assertEqual(result.stdout, "", arguments)
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, f"{arguments}: {result.stderr}")
        self.assertTrue(lines[0].startswith("sparsemla: error: "), lines[0])
        for text in mentions:
            self.assertIn(str(text), lines[0], arguments)
        return lines[0]

    def corrupted(self, name, change):
        """A copy of the small case whose header and payload went through `change`."""
        header, payload = read_safetensors(self.case)
        payload = bytearray(payload)
        change(header, payload)
        write_safetensors(self.path(name), header, bytes(payload))
        return self.path(name)


class Usage(ToolTest):
    def test_help_everywhere(self):
        for command in ("env", "gen", "decode", "check", "plan", "convert", "info", "bench"):
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
        self.refuse(*Bench.ONE, "--suite", "speed", "--plot", self.path("large"), mentions=["large"],
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
                result = subprocess.run([TOOL, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
                self.assertEqual(result.returncode, 2, arguments)
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
                self.assertIn("standard output", result.stderr)

    def test_closed_stdout(self):
        result = subprocess.run(["sh", "-c", f'"{TOOL}" info "{self.case}" >&-'], capture_output=True, text=True)
        self.assertEqual(result.returncode, 2)
        self.assertIn("standard output", result.stderr)

    def test_broken_pipe_is_quiet(self):
        result = subprocess.run(["bash", "-c", f'"{TOOL}" info "{self.case}" --slots 0-60 --dump | head -n 1'],
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


class Gen(ToolTest):
    RECORDS = [("bf16", 1152), ("fp8", 576), ("fp8", 512), ("fp8_ds_mla", 656), ("fp8_ds_mla_norope", 528),
               ("fp8_v4", 584), ("fp8_v41", 528), ("nvfp4_v41", 288), ("nvfp4_ds_mla", 352)]

    def test_every_record_passes_its_check(self):
        paths = []
        for record, size in self.RECORDS:
            paths.append(self.path(f"{record}_{size}"))
            self.succeed("gen", paths[-1], "--record", record, "--record-bytes", size, "--rows", 2, "--heads", 3,
                         "--width", 65, "--counts", "ragged", "--sinks", "--seed", size)
        document = self.succeed_json("check", "--device", "cpu", "--rms", *paths)
        for case in document["cases"]:
            self.assertEqual(case["status"], "pass")
            kernels = {run["kernel"] for run in case["runs"]}
            self.assertEqual(kernels, {"cpu", "reference"}, case["path"])

    def test_same_seed_same_file(self):
        files = []
        for name, seed in (("first", 7), ("second", 7), ("third", 8)):
            self.succeed("gen", self.path(name), "--record", "fp8", "--width", 8, "--seed", seed)
            with open(self.path(name), "rb") as file:
                files.append(file.read())
        self.assertEqual(files[0], files[1])
        self.assertNotEqual(files[0], files[2])

    def test_two_sources(self):
        for lists in ([], ["--one-list", "--counts", "130,20"]):
            path = self.path("two")
            self.succeed("gen", path, "--record", "fp8_v41", "--rows", 2, "--heads", 5, "--width", 128, "--page-size", 32,
                         "--extra-record", "nvfp4_v41", "--extra-width", 33, "--extra-page-size", 16,
                         "--extra-layout", "contiguous", "--lse", "log2", *lists)
            document = self.succeed_json("check", path)
            self.assertEqual(document["status"], "pass")
            sources = self.succeed_json("info", path)["sources"]
            self.assertEqual([source["record"] for source in sources], ["fp8_v41", "nvfp4_v41"])
            self.assertEqual([source["layout"] for source in sources], ["planar", "contiguous"])
            self.assertEqual(sources[1]["count_offset"], 128 if lists else 0)

    def test_geometry(self):
        path = self.path("geometry")
        self.succeed("gen", path, "--record", "fp8", "--width", 9, "--page-size", 4, "--slots-per-page", 7, "--pages", 6)
        (source,) = self.succeed_json("info", path)["sources"]
        self.assertEqual((source["page_size"], source["slots_per_page"], source["pages"], source["num_slots"]),
                         (4, 7, 6, 5 * 7 + 4))
        path = self.path("split")
        self.succeed("gen", path, "--record", "bf16", "--width", 9, "--split-rope", "--no-expected")
        tensors = self.succeed_json("info", path)["tensors"]
        self.assertIn("cache_rope", tensors)
        self.assertNotIn("expected.out", tensors)

    def test_contradictions(self):
        gen = ["gen", self.path("never"), "--width", 8]
        self.refuse(*gen, "--record", "fp8", "--split-rope", mentions=["--split-rope"])
        self.refuse(*gen, "--record", "fp8", "--record-bytes", 656, mentions=[656])
        self.refuse(*gen, "--record", "fp8", "--layout", "planar", mentions=["--layout", "contiguous"])
        self.refuse(*gen, "--record", "fp8", "--extra-record", "fp8_v4", mentions=["--extra-record", "d_qk"])
        self.refuse(*gen, "--record", "fp8", "--extra-width", 8, mentions=["--extra-record"])
        self.refuse(*gen, "--record", "fp8", "--one-list", mentions=["--extra-record"])
        self.refuse(*gen, "--record", "fp8", "--rows", 2, "--counts", "1,2,3", mentions=["--counts", 2, 3])
        for counts in ("1,,2", "1;2", "many", "99999999999", "1,"):
            self.refuse(*gen, "--record", "fp8", "--counts", counts, mentions=["--counts"])
        self.refuse(*gen, "--record", "fp8", "--world", 4, mentions=["--token-ids"])
        self.refuse(*gen, "--record", "fp8", "--token-ids", "--world", 2, "--rank", 2, mentions=["--rank"])
        self.refuse(*gen, "--record", "fp8", "--token-ids", "--world", 2, "--interleave", 3, mentions=["--interleave"])
        self.assertFalse(os.path.exists(self.path("never")))


class Decode(ToolTest):
    def test_never_over_its_case(self):
        kept = self.path("kept")
        shutil.copy(self.case, kept)
        link = self.path("link")
        os.symlink(kept, link)
        self.refuse("decode", kept, "-o", "", mentions=["--output", "file name"])
        for output in (kept, link):
            self.refuse("decode", kept, "-o", output, mentions=["--output", "another file"])
        with open(kept, "rb") as now, open(self.case, "rb") as before:
            self.assertEqual(now.read(), before.read())

    def test_result_file(self):
        output = self.path("result")
        text = self.succeed("decode", self.case, "-o", output)
        self.assertIn("active columns", text)
        header, payload = read_safetensors(output)
        self.assertEqual((header["out"]["dtype"], header["out"]["shape"]), ("BF16", [3, 4, 512]))
        self.assertEqual((header["lse"]["dtype"], header["lse"]["shape"]), ("F32", [3, 4]))
        begin, end = header["lse"]["data_offsets"]
        lse = struct.unpack(f"<{(end - begin) // 4}f", payload[begin:end])
        expected_header, expected_payload = read_safetensors(self.case)
        begin, end = expected_header["expected.lse"]["data_offsets"]
        for got, expected in zip(lse, struct.unpack("<12f", expected_payload[begin:end])):
            if expected == float("-inf"):
                self.assertEqual(got, expected)
            else:
                self.assertAlmostEqual(got, expected, delta=1e-3)

    def test_json(self):
        document = self.succeed_json("decode", self.case, "--kernel", "reference")
        self.assertEqual(document["kernel"], "reference")
        self.assertEqual(document["device"], "cpu")
        self.assertEqual([row["row"] for row in document["rows"]], [0, 1, 2])
        self.assertEqual(document["rows"][1]["active_columns"], 0)
        self.assertEqual(document["rows"][1]["lse_min"], "-inf")
        self.assertEqual(document["rows"][1]["out_max"], 0)

    def test_options_reach_the_schedule(self):
        for p_format in ("e4m3", "f16", "p_f16"):
            document = self.succeed_json("decode", self.case, "--kernel", "cpu", "--p-format", p_format, "--splits", 3,
                                         "--threads", 1)
            self.assertIn("p_" + p_format.replace("p_", ""), document["schedule"])
            self.assertIn("splits=3", document["schedule"])
        for columns in ("blocks", "interleaved", "round_robin"):
            document = self.succeed_json("decode", self.case, "--kernel", "cpu", "--splits", 5, "--columns", columns)
            self.assertIn(f"splits=5 columns={columns} ", document["schedule"])
        self.refuse("decode", self.case, "--columns", "robin", mentions=["--columns", "robin", "round_robin"])

    def test_threads_change_no_bit(self):
        results = []
        for threads in (1, 2):
            output = self.path(f"threads{threads}")
            self.succeed("decode", self.case, "-o", output, "--threads", threads)
            results.append(read_safetensors(output)[1])
        self.assertEqual(results[0], results[1])


class Check(ToolTest):
    def test_pass(self):
        text = self.succeed("check", self.case)
        self.assertIn("PASS", text)
        self.assertNotIn("FAIL", text)
        self.assertIn("1 case", text)
        self.assertIn("all pass", text)

    def test_all_runs_every_weight_format(self):
        (case,) = self.succeed_json("check", "--kernel", "all", self.case)["cases"]
        runs = {(run["kernel"], run["p_format"]) for run in case["runs"]}
        self.assertLessEqual({("cpu", "p_e4m3"), ("cpu", "p_f16"), ("reference", "p_f64")}, runs)
        (case,) = self.succeed_json("check", "--kernel", "cpu", self.case)["cases"]
        self.assertEqual(len(case["runs"]), 1)

    def check_fails(self, path):
        result = run("check", path)
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertIn("FAIL", result.stdout)
        document = json.loads(run("check", path, "--json").stdout)
        self.assertEqual(document["status"], "fail")
        return document["cases"][0]

    def test_wrong_expected_out(self):
        for element in (0, 2 * 4 * 512 + 3 * 512 + 511):  # first row; last head and dimension of the last row

            def change(header, payload):
                at = header["expected.out"]["data_offsets"][0] + 4 * element
                (value,) = struct.unpack_from("<f", payload, at)
                struct.pack_into("<f", payload, at, value + 1)

            case = self.check_fails(self.corrupted("wrong_out", change))
            self.assertIn("again: sparsemla check --device cpu --kernel", run("check", case["path"]).stdout)
            self.assertFalse(case["expected"]["pass"])
            for checked in case["runs"]:
                self.assertTrue(checked["float64"]["pass"])
                self.assertFalse(checked["expected"]["pass"])

    def test_wrong_value_in_an_empty_row(self):
        def change(header, payload):
            struct.pack_into("<f", payload, header["expected.out"]["data_offsets"][0] + 4 * (4 * 512 + 5), 0.25)

        self.check_fails(self.corrupted("wrong_empty", change))

    def test_wrong_expected_lse(self):
        def change(header, payload):
            at = header["expected.lse"]["data_offsets"][0]
            (value,) = struct.unpack_from("<f", payload, at)
            struct.pack_into("<f", payload, at, value + 0.05)

        self.check_fails(self.corrupted("wrong_lse", change))

    def test_nan_expected(self):
        def change(header, payload):
            struct.pack_into("<f", payload, header["expected.out"]["data_offsets"][0], float("nan"))

        self.check_fails(self.corrupted("nan_expected", change))

    def test_worst_status_wins_and_all_files_are_tried(self):
        def change(header, payload):
            struct.pack_into("<f", payload, header["expected.lse"]["data_offsets"][0], 1e6)

        wrong = self.corrupted("wrong", change)
        result = run("check", wrong, self.path("missing"), self.case)
        self.assertEqual(result.returncode, 2)
        self.assertIn("missing", result.stderr)
        self.assertIn("FAIL", result.stdout)
        self.assertIn("small.safetensors", result.stdout)
        self.assertEqual(run("check", wrong, self.case).returncode, 1)
        document = json.loads(run("check", wrong, self.path("missing"), self.case, "--json").stdout)
        self.assertEqual([case["status"] for case in document["cases"]], ["fail", "error", "pass"])
        self.assertEqual(document["status"], "error")

    def test_kernel_that_declines(self):
        self.assertEqual(run("check", self.case, "--kernel", "cpu", "--p-format", "f64").returncode, 2)


class Plan(ToolTest):
    def test_of_a_case(self):
        text = self.succeed("plan", self.case)
        for word in ("kernel", "schedule", "reference", "workspace"):
            self.assertIn(word, text)

    def test_of_a_problem(self):
        document = self.succeed_json("plan", "--device", "cpu", "--record", "fp8_v4", "--rows", 2, "--heads", 64,
                                     "--width", 128, "--extra-record", "fp8_v4", "--extra-width", 512, "--sinks")
        self.assertEqual(document["kernel"], "cpu")
        self.assertIn("reference", [refusal["kernel"] for refusal in document["declined"]])
        self.assertTrue(all(refusal["reason"] for refusal in document["declined"]))
        self.assertEqual([source["width"] for source in document["problem"]["sources"]], [128, 512])
        self.assertEqual(document["problem"]["query"], "bf16")
        self.assertIsNone(document["tiling"])

    def test_errors(self):
        self.refuse("plan", mentions=["CASE", "--record"])
        self.refuse("plan", self.case, "--record", "fp8", mentions=["--record"])
        self.refuse("plan", "--heads", 4, mentions=["--record"])


class Convert(ToolTest):
    def test_ranks(self):
        for rank in range(3):
            ids, slots = self.path(f"ids{rank}"), self.path(f"slots{rank}")
            self.succeed("gen", ids, "--record", "fp8", "--rows", 5, "--heads", 2, "--width", 60, "--token-ids", "--world", 3,
                         "--rank", rank, "--interleave", 4, "--page-size", 8, "--slots-per-page", 11, "--counts", "20,0,7,1,20")
            self.assertIn("token_ids", self.succeed_json("info", ids)["tensors"])
            document = self.succeed_json("convert", ids, "-o", slots)
            self.assertEqual((document["world"], document["rank"], document["interleave"]), (3, rank, 4))
            rows = document["rows"]
            self.assertEqual([row["request"] for row in rows], [0, 0, 1, 1, 2])
            for row in rows:
                self.assertEqual(row["owned"], row["kept"])
                self.assertGreaterEqual(row["token_ids"], row["kept"])
            self.assertGreater(rows[0]["token_ids"], rows[0]["kept"])
            self.succeed("check", ids, slots)
            self.assertIn("kept", self.succeed("convert", ids))
            self.assertIn("from token ids", self.succeed("check", ids, "--from-ids"))
            self.assertEqual(self.succeed_json("decode", ids, "--from-ids")["rows"], self.succeed_json("decode", slots)["rows"])

    def test_slots_beside_token_ids(self):
        ids = self.path("ids_and_slots")
        self.succeed("gen", ids, "--record", "fp8", "--rows", 2, "--heads", 1, "--width", 3, "--token-ids")
        header, payload = read_safetensors(ids)
        slots = {"dtype": "I32", "shape": [2, 3], "data_offsets": [len(payload), len(payload) + 24]}
        write_safetensors(ids, {**header, "slots": slots}, payload + bytes(24))
        self.refuse("convert", ids, mentions=["token_ids", "slots"])

    def test_a_case_with_slots(self):
        self.refuse("convert", self.case, mentions=["token_ids"])
        for subcommand in ("decode", "plan"):
            self.refuse(subcommand, self.case, "--from-ids", mentions=["--from-ids", "token_ids"])
        plan = self.succeed_json("plan", "--record", "fp8", "--from-ids", "--device", "cpu")
        self.assertIs(plan["problem"]["from_ids"], True)


class Info(ToolTest):
    def test_content(self):
        text = self.succeed("info", self.case)
        for word in ("query", "F8_E4M3", "[3, 4, 576]", "softmax_scale", "fp8 (576 bytes)"):
            self.assertIn(word, text)

    def test_records(self):
        for record in ("fp8", "fp8_ds_mla", "fp8_v4", "nvfp4_ds_mla", "bf16"):
            path = self.path("info_" + record)
            self.succeed("gen", path, "--record", record, "--width", 4, "--page-size", 4, "--heads", 1)
            text = self.succeed("info", path, "--slots", "0,2-3")
            for slot in (0, 2, 3):
                self.assertIn(f"slot {slot}:", text)
            dump = self.succeed("info", path, "--slots", "1", "--dump")
            self.assertGreater(len(dump), len(text))

    def test_dump_shows_the_bytes(self):
        header, payload = read_safetensors(self.case)
        begin = header["cache"]["data_offsets"][0]
        dump = self.succeed("info", self.case, "--slots", "3", "--dump")
        first = payload[begin + 3 * 576 : begin + 3 * 576 + 4].hex()
        self.assertIn(first, dump)

    def test_errors(self):
        for slots in ("1000000", "-1", "a", "5-2", "1,,2", "0-99999999"):
            self.refuse("info", self.case, f"--slots={slots}", mentions=["--slots"])
        self.refuse("info", self.case, "--slots", "0", "--source", "1", mentions=["--source"])
        self.refuse("info", self.case, "--dump", mentions=["--slots"])


class Bench(ToolTest):
    ONE = ["bench", "--device", "cpu", "--filter", "fp8_512", "--repeat", 3, "--threads", 1]

    def test_json_and_plot(self):
        plot = self.path("plot.svg")
        document = self.succeed_json(*self.ONE, "--plot", plot)
        self.assertEqual(list(document), ["version", "suite", "repeat", "limits", "timings"])
        self.assertGreater(document["limits"]["fma_flop_per_s"], 0)
        self.assertGreater(document["limits"]["read_bytes_per_s"], 0)
        for timing in document["timings"]:
            self.assertLessEqual(timing["p10_s"], timing["median_s"])
            self.assertLessEqual(timing["median_s"], timing["p90_s"])
            self.assertGreater(timing["limit_percent"], 0)
        root = xml.etree.ElementTree.parse(plot).getroot()
        labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        for timing in document["timings"]:
            self.assertIn(timing["problem"], labels)

    def test_json_file(self):
        path = self.path("timings.json")
        text = self.succeed(*self.ONE, "--json", path)
        self.assertIn("wrote " + path, text)
        with open(path, encoding="utf-8") as file:
            self.assertEqual(json.load(file)["repeat"], 3)
        self.refuse(*self.ONE, "--json", self.path("missing/timings.json"), mentions=["missing/timings.json"])

    def test_gpu_suites_need_a_gpu(self):
        for arguments in (["--suite", "latency"], ["--sweep"]):
            self.refuse("bench", "--device", "cpu", *arguments, mentions=["--device", "GPU", "'cpu'"])
            self.refuse("bench", "--device", "cuda:99", *arguments, mentions=["cuda:99"])
        for option in ("--minutes", "--resume", "--write-table"):
            self.refuse("bench", option, "1", mentions=[option, "--sweep"])
        self.refuse("bench", "--suite", "latency", "--csv", mentions=["--csv", "--json"])
        self.refuse("bench", "--baseline", "x", mentions=["--baseline", "latency"])

    def test_csv(self):
        rows = list(csv.DictReader(io.StringIO(self.succeed(*self.ONE, "--csv"))))
        self.assertTrue(rows)
        for row in rows:
            self.assertGreater(float(row["median_us"]), 0)
            self.assertIn("chunk=", row["schedule"])

    def test_table(self):
        text = self.succeed(*self.ONE)
        for word in ("median", "p10", "p90", "GB/s", "GFLOP/s", "of limit", "limits measured now"):
            self.assertIn(word, text)


DEVICE = os.environ.get("SPARSEMLA_TEST_DEVICE", "cpu")


@unittest.skipIf(DEVICE == "cpu", "SPARSEMLA_TEST_DEVICE names no GPU")
class Gpu(ToolTest):
    def test_check(self):
        (case,) = self.succeed_json("check", "--device", DEVICE, "--kernel", "all", self.case)["cases"]
        self.assertTrue(case["runs"])
        self.assertEqual({run["device"] for run in case["runs"]}, {DEVICE})
        for kernel in ("cpu", "reference"):
            self.assertNotIn(kernel, [refusal["kernel"] for refusal in case["declined"]])

    def test_auto_checks_every_device(self):
        (case,) = self.succeed_json("check", "--kernel", "all", self.case)["cases"]
        self.assertLessEqual({DEVICE, "cpu"}, {run["device"] for run in case["runs"]})
        self.assertEqual(case["declined"], [])

    def test_decode(self):
        document = self.succeed_json("decode", self.case, "--device", DEVICE)
        self.assertEqual(document["device"], DEVICE)
        self.assertEqual([row["active_columns"] == 0 for row in document["rows"]], [False, True, False])
        self.assertEqual(document["rows"][1]["lse_max"], "-inf")
        self.assertGreater(document["seconds"], 0)

    def test_tiling(self):
        problem = ["--record", "fp8", "--heads", 64, "--width", 256, "--device", DEVICE, "--tile-heads", 32, "--stages", 2]
        document = self.succeed_json("plan", *problem, "--transport", "bulk", "--trigger", "end")
        self.assertEqual(document["tiling"], {"heads": 32, "stages": 2, "cluster_tiles": 1, "gather": "copies",
                                              "transport": "bulk", "trigger": "end"})
        self.refuse("plan", *problem[:-1], 5, mentions=["stages must be 1 .. "])
        results = []
        for tiling in (["--tile-heads", 16], ["--tile-heads", 32, "--transport", "bulk", "--stages", 2], ["--trigger", "start"]):
            output = self.path("tiling" + str(len(results)))
            self.succeed("decode", self.case, "--device", DEVICE, "--splits", 2, *tiling, "-o", output)
            results.append(read_safetensors(output)[1])
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0], results[2])

    def test_latency(self):
        path, plot = self.path("latency.json"), self.path("latency.svg")
        text = self.succeed("bench", "--suite", "latency", "--device", DEVICE, "--shape", "goal/fp8_5", "--repeats", 3,
                            "--json", path, "--plot", plot)
        for word in ("clocks", "device copy", "of floor", "goal/fp8_576/h96/r5/256of2048"):
            self.assertIn(word, text)
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        self.assertEqual(len(document["timings"]), 11)
        for timing in document["timings"]:
            self.assertIsNone(timing["refused"])
            self.assertGreater(timing["cold"]["median_us"], timing["floor_us"])
            self.assertGreater(timing["warm"]["median_us"], document["empty_launch_us"])
        xml.etree.ElementTree.parse(plot)

    def test_sweep(self):
        log, table = self.path("sweep.jsonl"), self.path("table.inc")
        sweep = ["bench", "--sweep", "--device", DEVICE, "--minutes", 0.05, "--resume", log, "--write-table", table]
        self.assertIn("again with --resume", self.succeed(*sweep))
        with open(log, encoding="utf-8") as file:
            first = file.read().splitlines()
        self.assertGreater(len(first), 8)
        self.succeed(*sweep)
        with open(log, encoding="utf-8") as file:
            self.assertEqual(file.read().splitlines()[:len(first)], first)
        with open(table, encoding="utf-8") as file:
            rows = [line for line in file if line.startswith("{")]
        self.assertGreater(len(rows), 1)

    def test_bench(self):
        timings = self.succeed_json("bench", "--device", DEVICE, "--filter", "fp8_576/h16/r8", "--repeat", 3)["timings"]
        self.assertTrue(timings)
        for timing in timings:
            self.assertEqual((timing["device"], timing["limit"]), (DEVICE, ""))


def shared_cases():
    """Case files of other makers, where a folder of them lies beside the source tree."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "shared", "cases")
    if not os.path.isdir(folder):
        return []
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors"))


class SharedCases(ToolTest):
    @unittest.skipUnless(shared_cases(), "no folder of shared cases")
    def test_all_pass(self):
        self.assertIn("all pass", self.succeed("check", "--device", "cpu", "--kernel", "all", *shared_cases()))


if __name__ == "__main__":
    TOOL = os.path.abspath(sys.argv.pop(1))
    unittest.main()
