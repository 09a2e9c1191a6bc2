#pragma once
// Text -> JSON document: what the configuration's dialect allows beyond JSON, and what it refuses.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace unshard::config {

using Json = nlohmann::ordered_json;  // keeps the order of the user's file

/// Comments (//, #, /* */), one comma before a closing bracket, and the words Infinity, inf and NaN (read as strings) are allowed.
/// \throws ConfigError  a syntax error with line and column; a key given twice, with its path; not an object; nested too deeply.
Json parse_document(std::string_view text, const std::string& source);
/// A whole file. \throws ConfigError when it can't be read.
std::string read_text_file(const std::string& path);

/// JSON as a person writes it: 500000000 and 5e-05, strings quoted; cut when long.
std::string show(const Json& value);

}  // namespace unshard::config
