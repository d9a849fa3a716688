"""The tool from a shell's point of view: case files: gen, decode, check, plan, convert, info."""

import json
import os
import shutil
import struct

from tool_testing import ToolTest, main, read_safetensors, run, write_safetensors


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


if __name__ == "__main__":
    main()
