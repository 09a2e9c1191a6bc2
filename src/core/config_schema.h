#pragma once
// The schema of the DeepSpeed JSON as data: one row a key. Validation, defaults, suggestions and docs/config.md all read these rows;
// a new key is a new row. The rows are split over config_schema_<subject>.cc.
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace unshard::config {

/// What a value may be.
enum class Kind {
  boolean,
  integer,  ///< 5e8 counts: a float with an integral value
  number,
  string,
  dtype,      ///< "fp32", "bf16", "fp16" and their synonyms
  choice,     ///< one of Key::accepted; strings match in any case
  strings,    ///< list of strings
  integers,   ///< list of integers
  numbers,    ///< list of numbers, each within the range
  per_group,  ///< a number, or a list with one for each of the optimizer's parameter groups
  list,       ///< list of anything
  object,     ///< object whose keys aren't ours to check
  any,
  section,         ///< object with a Section of its own
  section_list,    ///< list of such objects; the section's path ends in "[]"
  named_sections,  ///< object of freely named such objects; the section's path ends in ".*"
};

/// What this version does with a key.
enum class State {
  built,      ///< has its effect
  accepted,   ///< checked and accepted, changes nothing here
  not_built,  ///< values that ask for nothing are accepted, the rest is refused
  removed,    ///< refused with the note as the reason
};

struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool open_min = false, open_max = false;  ///< the bound itself is excluded
  bool contains(double value) const { return (open_min ? value > min : value >= min) && (open_max ? value < max : value <= max); }
};
inline constexpr Range kCount = {.min = 1};
inline constexpr Range kNotNegative = {.min = 0};
inline constexpr Range kPositive = {.min = 0, .open_min = true};
inline constexpr Range kShare = {.min = 0, .max = 1};

struct Key {
  std::string_view name;
  Kind kind = Kind::boolean;
  std::string_view initial = "null";  ///< default, as JSON; null: absent, and null may be written
  State state = State::built;
  Range range = {};
  std::string_view accepted = {};  ///< JSON list, for choice
  std::string_view idle = {};      ///< JSON list of values that ask for nothing, beside the default; for not_built
  std::vector<std::string_view> aliases = {};
  std::string_view note = {};
  bool required = false;  ///< the section makes no sense without it
  bool infinite = false;  ///< infinity may be written
  int length = 0;         ///< of a list; 0: any
};

struct Section {
  std::string_view path;  ///< "" for the top level, "zero_optimization.offload_param", ...
  std::vector<Key> keys;
  std::vector<std::string_view> types = {};  ///< for optimizer.params and scheduler.params: the types (lower case) these rows are for
  bool quiet = false;                        ///< its switch isn't built, so that its other keys never matter and aren't worth a line
};

/// Every section, the top level first; built once.
const std::vector<Section>& schema();
/// The section at `path`; for the two params sections also of `type` (lower case). Null if there is none.
const Section* find_section(std::string_view path, std::string_view type = {});
/// The row called `name`, or by an alias; null if none.
const Key* find_key(const Section& section, std::string_view name);
/// Edit distance with transpositions of neighbours.
int edit_distance(std::string_view a, std::string_view b);
/// The edit distance, or fewer: a whole word left out or added ("warmup_steps" for "warmup_num_steps") counts as one.
int name_distance(std::string_view a, std::string_view b);
/// Names (aliases included) nearest to a misspelt one: all at the smallest distance. Keys that were removed aren't proposed.
std::vector<std::string_view> nearest_names(const Section& section, std::string_view misspelt);
/// Sections in which `name` would be right, for a key put at the wrong level.
std::vector<std::string_view> sections_with(std::string_view name);

/// Types of `optimizer` and `scheduler` that the JSON knows by name; others are classes of torch.
struct NamedType {
  std::string_view name;  ///< canonical spelling
  State state = State::built;
  std::string_view note = {};
};
/// \param owner "optimizer" or "scheduler". Null for other types; any case matches.
const NamedType* find_type(std::string_view owner, std::string_view type);

/// "parent.name", or "name" at the top level.
std::string join_path(std::string_view parent, std::string_view name);
/// ASCII only, as all names are.
std::string lower_case(std::string_view text);
/// What a row accepts, in words: "an integer from 0 to 3".
std::string accepted_text(const Key& key);
/// The whole of docs/config.md.
std::string schema_markdown();

// The rows, by subject.
std::vector<Section> general_sections();
std::vector<Section> optimizer_sections();
std::vector<Section> zero_sections();
std::vector<Section> storage_sections();
std::vector<Section> parallel_sections();
std::vector<Section> observe_sections();

}  // namespace unshard::config
